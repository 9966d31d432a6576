"""Transformers: a recipe in ``config.json``, models converted when they load, state that advances."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hybridtensor.arguments import require_items, require_kind, require_text, shown, wrong
from hybridtensor.convert import quantize_
from hybridtensor.layers import layers_of
from hybridtensor.recipes import from_name
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.selection import Plan, choose
from hybridtensor.state import STATE, LayerState
from hybridtensor.state.step import step_
from hybridtensor.state.training import layer_states
from hybridtensor.torchao_compat import FqnToConfig, config_from_dict, config_to_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

METHOD = "hybridtensor"
_STATE_FILE = f"{STATE}.safetensors"  # beside adapters
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class HasScalars(Protocol):
    """Statistics that can be logged."""

    def scalars(self) -> dict[str, float]:
        """Return numbers by name."""


@register_quantization_config(METHOD)
class HybridTensorConfig(QuantizationConfigMixin):
    """The recipe of a model, for ``from_pretrained(quantization_config=...)`` and ``config.json``.

    ::

        config = HybridTensorConfig("fp8", keep_bf16=["model.layers.0"])
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    Args:
        recipe: A name or spec, a ``HybridConfig``, or torchao's ``FqnToConfig`` of such; also the
            dictionary that ``config.json`` has of one of the latter.
        keep_bf16: As for ``quantize_``.

    Raises:
        TypeError: If the recipe is another kind: a function cannot be written into ``config.json``.
        ValueError: If a word of the recipe is unknown.
    """

    def __init__(
        self,
        recipe: str | HybridConfig | FqnToConfig | dict[str, object],
        keep_bf16: Iterable[str] = (),
        **saved: object,
    ) -> None:
        known = saved.pop("quant_method", METHOD)
        if saved or known != METHOD:
            raise ValueError(
                f"HybridTensorConfig: recipe and keep_bf16 are required, got {shown(saved or known)}; "
                "drop the others"
            )
        self.quant_method = METHOD
        self.recipe = recipe if isinstance(recipe, (str, dict)) else _written(recipe)
        who, what = "HybridTensorConfig", "a list of names as keep_bf16"
        self.keep_bf16 = require_items(who, what, keep_bf16)
        for name in self.keep_bf16:
            require_text(who, **{"a name in keep_bf16": name})
        self.read()

    def read(self) -> HybridConfig | FqnToConfig:
        """Return the recipe as ``quantize_`` takes it."""
        if isinstance(self.recipe, str):
            return from_name(self.recipe)
        if self.recipe.get("_type") not in ("HybridConfig", "FqnToConfig"):
            raise wrong(
                "HybridTensorConfig",
                "a HybridConfig or FqnToConfig of torchao's config_to_dict",
                self.recipe,
            )
        return config_from_dict(self.recipe)


def _written(recipe: object) -> str | dict[str, object]:
    """Return a recipe as JSON has it: a spec if there is one, else torchao's dictionary."""
    if isinstance(recipe, HybridConfig) and not str(recipe).startswith("HybridConfig("):
        return str(recipe)
    if isinstance(recipe, (HybridConfig, FqnToConfig)):
        written: dict[str, object] = config_to_dict(recipe)
        return written
    raise TypeError(
        f"HybridTensorConfig: a spec, HybridConfig or FqnToConfig is required, got {shown(recipe)}; "
        "others cannot be saved: load the model plain and call quantize_"
    )


@register_quantizer(METHOD)
class HybridTensorQuantizer(HfQuantizer):
    """Converts models whose weights were loaded as those of plain ones, which they are."""

    is_trainable = True
    is_qat_trainable = True
    is_compileable = True
    quantization_config: HybridTensorConfig

    def is_serializable(self) -> bool:
        """Return True: state dicts of converted models are plain, and have the state of recipes."""
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Write the recipes that layers have now into the model's config, and leave its weights to Transformers."""
        layers = [(layer, layer.recipe.config) for layer in layers_of(model) if layer.recipe]
        recipes = _by_name(layers)
        if recipes:
            self.quantization_config = _config_of(model, recipes, self.quantization_config)
            model.config.quantization_config = self.quantization_config
        elif hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        _save_states_once(model)
        return None, {}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: object
    ) -> None:
        self._files = [str(file) for file in checkpoint_files or ()]
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        # Private to Transformers: what is no error although the plain model has no such entry. Without it a warning
        # would name the whole state.
        model._keys_to_ignore_on_load_unexpected = {*ignored, rf"{STATE}\."}  # loaded by ourselves

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: object
    ) -> PreTrainedModel:
        config = self.quantization_config
        quantize_(model, config.read(), keep_bf16=config.keep_bf16)
        saved: dict[str, Tensor] = {}
        for file in self._files if layer_states(model) else ():
            with safe_open(file, "pt") as tensors:
                names = [name for name in tensors.keys() if STATE in name]  # noqa: SIM118  (no dict)
                saved |= {name: tensors.get_tensor(name) for name in names}
        if saved:
            _load_state(model, saved)
        return model


class StepCallback(TrainerCallback):
    """Advance the state of recipes after each step that Trainer's optimizer takes.

    ::

        Trainer(model, arguments, train_dataset=data, callbacks=[StepCallback()]).train()

    Args:
        watched: What has statistics by a method ``scalars()``; they are logged with the loss. What
            reports logs (TensorBoard, W&B) is called before callbacks that Trainer is given, and
            sees them after ``StepCallback(watched).attach(trainer)``.
    """

    def __init__(self, watched: HasScalars | None = None) -> None:
        if watched is not None and not callable(getattr(watched, "scalars", None)):
            raise wrong("StepCallback", "None, or an object with a method scalars()", watched)
        self._watched = watched

    def attach(self, trainer: Trainer) -> StepCallback:
        """Put this callback before all others of a trainer, and return it."""
        require_kind("StepCallback.attach", "a Trainer", trainer, Trainer)
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: object = None,
        **_: object,
    ) -> None:
        """Advance, or drop the amaxes of a step that a gradient scaler skipped."""
        step_(model, skipped=bool(getattr(optimizer, "step_was_skipped", False)))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: object,
    ) -> None:
        """Save the state of recipes beside adapters, whose checkpoints leave out the model below them."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir() and not _holds_state(folder):
            saved = _state_of(model)
            if saved:
                save_file(saved, folder / _STATE_FILE)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: object,
    ) -> None:
        """Load the state that was saved beside adapters, when Trainer resumes."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not state.global_step or not _is_fresh(model):
            return
        file = folder / _STATE_FILE
        if file.is_file():
            model.load_state_dict(load_file(file), strict=False)
        else:
            warnings.warn(
                f"StepCallback: {folder} has no state of recipes, so that delayed scales and random rounding start "
                "fresh; checkpoints that StepCallback was there to save have it",
                UserWarning,
                stacklevel=2,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: object,
    ) -> None:
        """Add the statistics to what is logged of training."""
        if self._watched is not None and "loss" in logs:
            numbers = self._watched.scalars()
            logs.update(numbers)
            # Trainer has put ``logs`` into its history before it calls back.
            state.log_history[-1].update(numbers)


def _by_name(plan: Plan) -> dict[str, HybridConfig]:
    """Return recipes by the names that layers have in the model without wrappers."""
    names = [[part for part in layer.name.split(".") if part not in _WRAPPED] for layer, _ in plan]
    return {".".join(name): recipe for name, (_, recipe) in zip(names, plan, strict=True)}


def _config_of(
    model: PreTrainedModel, recipes: dict[str, HybridConfig], last: HybridTensorConfig
) -> HybridTensorConfig:
    """Return the config that gives each layer the recipe that it has now: the last one, if it still does."""
    first, *others = dict.fromkeys(recipes.values())
    candidates = [last] if others else [last, HybridTensorConfig(first, last.keep_bf16)]
    for config in candidates:
        try:
            plan = choose(model, config.read(), keep_bf16=config.keep_bf16)
        except ValueError:  # it names a layer that the model had
            continue
        if _by_name(plan) == recipes:
            return config
    return HybridTensorConfig(FqnToConfig(OrderedDict(recipes)))


def _save_states_once(model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` save the state that tied layers share by one name: it refuses tensors with several."""
    ignored = [name for name in model._keys_to_ignore_on_save or () if STATE not in name]
    # Private to Transformers: entries that it deletes from the state dict.
    model._keys_to_ignore_on_save = [*ignored, *(_all_names(model) - _state_of(model).keys())]


def _load_state(model: PreTrainedModel, saved: dict[str, Tensor]) -> None:
    """Load the state of recipes that a checkpoint has, under the names that the model has for it."""
    own = dict.fromkeys(_all_names(model), True)
    # Private to Transformers: how it renamed the weights of this checkpoint, which ``save_pretrained`` reverses.
    changes = getattr(model, "_weight_conversions", None) or ()
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    names = {
        name: rename_source_key(name, renamings, [], model.base_model_prefix, own)[0]
        for name in saved
    }
    model.load_state_dict({names[name]: value for name, value in saved.items()}, strict=False)
    loaded = {name.rpartition(".")[0] + "." for name in names.values()}
    known = {state for prefix, state in _named_states(model) if prefix in loaded}
    fresh = [prefix[:-1] for prefix, state in _named_states(model) if state not in known]
    if fresh:
        warnings.warn(
            f"HybridTensorConfig: the checkpoint has no state of recipes for {len(fresh)} layers, such as "
            f"{min(fresh)}, so that their delayed scales and random rounding start fresh; to resume "
            "training load the model's own state_dict() instead, which has it",
            UserWarning,
            stacklevel=2,
        )


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of recipes by its names in the model's state dict, what tied layers share by the first."""
    # Not by the model's own ``state_dict``: rank 0 alone comes here, while FullyShardedDataParallel would gather all
    # parameters from all ranks.
    found: dict[str, Tensor] = {}
    first = {state: prefix for prefix, state in reversed([*_named_states(model)])}
    for state, prefix in first.items():
        found |= state.state_dict(prefix=prefix)
    return {name: value.contiguous() for name, value in found.items()}


def _all_names(model: nn.Module) -> set[str]:
    """Return all names of the state of recipes in the model's state dict."""
    return {
        f"{prefix}{name}" for prefix, state in _named_states(model) for name in state.state_dict()
    }


def _named_states(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, LayerState]]:
    """Yield each layer's state, with what its entries in the model's state dict begin with."""
    for name, child in module._modules.items():
        # wrappers of torch whose names state dicts leave out
        inner = prefix if name in _WRAPPED else f"{prefix}{name}."
        if isinstance(child, LayerState):
            yield inner, child
        elif child is not None:
            yield from _named_states(child, inner)


def _is_fresh(model: nn.Module) -> bool:
    """Return whether a model has state that is as it is before the first step: no checkpoint had any."""
    states = layer_states(model)
    moved = any(
        (one.rounding is not None and bool(one.rounding[1]))
        or (one.amax_history is not None and bool(one.amax_history.any()))
        for one in states
    )
    return bool(states) and not moved


def _holds_state(folder: Path) -> bool:
    """Return whether the weights that Trainer saved in a folder have the state of recipes with them."""
    for file in folder.glob("*.safetensors"):
        if file.name != _STATE_FILE:
            with safe_open(file, "pt") as tensors:
                if any(STATE in name for name in tensors.keys()):  # noqa: SIM118  (no dict)
                    return True
    return False
