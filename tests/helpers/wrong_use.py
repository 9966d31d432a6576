"""Every public callable with every parameter of every wrong kind, from one table of valid calls.

``outcomes()`` tries them, and says of each whether it ended in a clear error; also under ``python -O``::

    python -O -c "import wrong_use; wrong_use.main()"
"""

import contextlib
import importlib
import inspect
import io
import re
import sys
import tempfile
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

from valid_calls import FOLDER, KINDS, ROWS

import hybridtensor as ht

PACKAGE = str(Path(ht.__file__).parent)
CLEAR = (ValueError, TypeError, NotImplementedError, RuntimeError)
BEGINS = re.compile(r"([\w.<>]+|layer [\w.<>]+(, \w+)?|quantizer factory): \S")  # who is asked

# -- what has no row, and why

METHODS_OF_OTHERS = {
    # tensor classes, of each other
    *(
        "alias",
        "alias_of",
        "carried",
        "data_ptr",
        "from_parts",
        "like",
        "map_inner",
        "mark_written",
        "own_names",
        "parts",
    ),
    *("rows", "share_memory_", "take_carried", "take_memory", "untyped_storage", "view_of"),
    # layers, on every product
    *(
        "cast",
        "check_matrix",
        "check_shape",
        "check_sizes",
        "named_modules",
        "count_step",
        "faces_in_eager_code",
        "set_lineage",
        "mark_backward",
        "delayed_rules",
        "draws",
        "faces",
        "materialize_",
    ),
    *(
        "amaxes",
        "derive_columnwise",
        "quantized",
        "request",
        "require",
        "scale_shape",
        "set_placeholder",
        "simplified",
        "stored",
        "stream",
        "take_name",
    ),
    *("become", "check_common_scale", "faces_apart", "parameter_of", "present", "seen"),
    *("context_of_products", "of_gradient", "stamp", "with_values"),
    *("tensor_scale_shape", "tensors"),
    # torch, with what it made
    *("check_shards", "commit_tensor", "create_global_plan", "create_local_plan", "extra_repr"),
    *("fsdp_post_all_gather", "fsdp_pre_all_gather", "load_bytes", "misfits", "read_metadata", "reset_parameters"),
    *("finish_plan", "places", "read_data", "resolve_data", "set_up_storage_reader", "stage_values"),
    *("set_up_planner", "stage", "transform_object"),
}
"""Methods that only this package, and torch, call: with what they made, on every operation."""
PARTS = {
    *("Backward", "Gradients", "SavedInput", "GatheredWeight", "Needs", "Operand", "input_operand", "output"),
    *("weight_operand", "Saving", "Traffic"),
}
"""Parts of a layer, called on every product; and records that functions return."""

MODULES = [ht, *(importlib.import_module(f"hybridtensor.{name}") for name in (
    "costs", "distributed", "distributed.checkpoint", "formats", "linear", "offload", "optim", "recipes", "testing",
))]  # fmt: skip


def public():
    """Yield name and object of every public function, class and method that takes arguments."""
    seen = set()
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or isinstance(value, types.ModuleType) or id(value) in seen or name in PARTS:
                continue
            seen.add(id(value))
            if not inspect.isclass(value) or is_made_by_us(value):
                yield name, value
            if inspect.isclass(value):
                yield from methods(value)


def is_made_by_us(cls):
    """Return whether this package says what a class is made from; torch does for planners and readers."""
    ours = [owner for owner in cls.__mro__ if owner.__module__.startswith("hybridtensor")]
    return any({"__init__", "__new__"} & vars(owner).keys() for owner in ours)


def methods(cls):
    """Yield the public methods of a class, by the class that defines them."""
    known = set(METHODS_OF_OTHERS)
    for owner in cls.__mro__:
        if owner.__module__.startswith("hybridtensor"):
            for name in vars(owner).keys() - known:
                if not name.startswith("_") and callable(getattr(cls, name)):
                    yield f"{owner.__name__}.{name}", getattr(cls, name)
            known |= vars(owner).keys()


def parameters(function):
    """Return the names of the parameters, without ``self`` and what is passed on."""
    known = inspect.signature(function).parameters.values()
    named = [p.name for p in known if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [name for name in named if name not in ("self", "quantizer")]


@dataclass(frozen=True)
class Outcome:
    """What came of one call.

    Attributes:
        name: What was called.
        parameter: Which parameter was replaced.
        kind: By what.
        expected: ``"clear error"`` or ``"accepted"``.
        got: That, or what came instead.
    """

    name: str
    parameter: str
    kind: str
    expected: str
    got: str

    @property
    def is_right(self):
        return self.got == self.expected

    def __str__(self):
        return f"{self.name}({self.parameter}={self.kind}): {self.expected} is right, got {self.got}"


def result_of(call):
    """Return ``"accepted"``, ``"clear error"``, or what an unclear error says."""
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.chdir(tempfile.mkdtemp(dir=FOLDER.name)))  # "nonsense" is a path, too
            call()
    except CLEAR as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        file = frame.f_code.co_filename
        told = f"{type(error).__name__}: {error}"
        if not file.startswith(PACKAGE):
            return f"{told[:160]} (raised in {file}:{line})"
        return "clear error" if BEGINS.match(str(error)) else f"{told[:160]} (without who)"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return "accepted"


def call_with(row, **replaced):
    """Call what a row calls with some arguments replaced."""
    function, arguments = row.make()
    arguments |= replaced
    known = inspect.signature(function).parameters
    by_position = [n for n, p in known.items() if p.kind == p.POSITIONAL_ONLY and n in arguments]
    given = [arguments.pop(name) for name in by_position]
    return function(*given, **arguments)


def outcomes(names=None):
    """Yield the outcome of every wrong use."""
    for name in names or ROWS:
        row = ROWS[name]
        for parameter in row.make()[1]:
            if parameter in row.plumbing:
                continue
            for kind, make in KINDS.items():
                accepted = kind in row.accepts.get(parameter, ())
                wrong = make()
                got = result_of(lambda row=row, parameter=parameter, wrong=wrong: call_with(row, **{parameter: wrong}))
                yield Outcome(name, parameter, kind, "accepted" if accepted else "clear error", got)


def main():
    """Print what is not right; exit with 1 if anything is."""
    found = list(outcomes())
    wrong = [outcome for outcome in found if not outcome.is_right]
    for outcome in wrong:
        print(outcome)
    print(f"{len(found)} tried, {len(wrong)} not right, __debug__ is {__debug__}")
    sys.exit(bool(wrong))
