"""High-precision master weights for persistent low-precision parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict

from hybridtensor.arguments import require_function, require_items, wrong
from hybridtensor.dtensor import local, with_local
from hybridtensor.masters import (
    check_groups,
    checked_group,
    follows_from_master,
    high_precision_values,
    is_zero,
    persistent_part,
    raising_everywhere,
    set_master,
    warn_of_rounded,
)
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.high_precision import values_in
from hybridtensor.subclasses.quantizing import refresh_all_

__all__ = ["MasterWeights"]

T = TypeVar("T")

# Optimizers choose their foreach implementation on a GPU by exact type, from a private list that
# DTensor enters itself into, too. Without the list, steps of master weights are as right, but slow.
_foreach_types = getattr(
    sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", []
)
if MasterWeight not in _foreach_types:
    _foreach_types.append(MasterWeight)


class MasterWeights(torch.optim.Optimizer):
    """Run any torch optimizer on fp32 masters of persistent (``HybridTensor``) parameters, and requantize these.

    ::

        ht.quantize_(model, "mxfp8", persistent=True)
        optimizer = ht.optim.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)

    Every persistent parameter gets an fp32 master: its original values, which the parameter then frees, or else its
    dequantized values. Other parameters are updated as usual. After a step each persistent parameter has the bits of
    ``quantize(master)``, written in place. Other writes into a parameter, such as loaded values, also set its master.
    Methods that the optimizer alone has, such as ``eval`` of schedule-free ones, run on the masters in the same way.

    Args:
        optimizer_class: For example ``torch.optim.AdamW``.
        params: Parameters, or parameter groups, as for any optimizer.
        kwargs: Passed to ``optimizer_class``.

    Raises:
        TypeError: If ``optimizer_class`` is not an optimizer class, or changes the parameter groups, as torchao's
            ``CPUOffloadOptimizer`` does, which steps parameters in hooks of backward.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params: ParamsT, /, **kwargs: Any
    ) -> None:
        kind = optimizer_class if isinstance(optimizer_class, type) else object
        if not issubclass(kind, torch.optim.Optimizer) or issubclass(kind, MasterWeights):
            advice = "pass the class that steps the masters, such as torch.optim.AdamW"
            raise wrong("MasterWeights", "an Optimizer class", optimizer_class, advice)
        given = require_items("MasterWeights", "what model.parameters() gives", params)
        if given and not isinstance(given[0], dict):
            given = [{"params": given}]
        groups = [checked_group("MasterWeights", group) for group in given]
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []  # persistent parameter and its master
        inner_groups = [
            {**group, "params": [self._stepped(p) for p in group["params"]]} for group in groups
        ]
        self.inner = optimizer_class(inner_groups, **kwargs)
        if [len(group["params"]) for group in self.inner.param_groups] != [
            len(group["params"]) for group in groups
        ]:
            raise TypeError(
                "MasterWeights: an optimizer that keeps its parameter groups is required, got "
                f"{optimizer_class.__name__}; give it master weights: quantize_(model, config) without persistent=True"
            )
        super().__init__(groups, self.inner.defaults)
        self._share_groups()
        self._set_masters(self._pairs)

    def _stepped(self, parameter: Tensor | tuple[str, Tensor]) -> Any:
        """Make a master of a persistent parameter, return any other parameter unchanged; with its name if given."""
        if isinstance(parameter, tuple):
            return (*parameter[:-1], self._stepped(parameter[-1]))
        part = local(parameter)
        if not isinstance(part, HybridTensor):
            return parameter
        values = with_local(parameter, high_precision_values(part).to(torch.float32, copy=True))
        master = nn.Parameter(values, requires_grad=parameter.requires_grad)
        self._pairs.append((parameter, master))
        return master

    def _set_masters(self, pairs: list[tuple[Tensor, nn.Parameter]]) -> None:
        """Let new masters hold the values of parameters, which free their originals: once the optimizer is made."""
        for parameter, master in pairs:
            part = persistent_part(parameter)
            known = part.high_precision
            rounded = known.lost or known.rounded
            set_master(parameter, master, follows=known.follows)
            part.high_precision.rounded = rounded

    @property
    def state(self) -> defaultdict[Tensor, StateDict]:
        """The inner optimizer's state by parameter, with the masters; nothing before the first step.

        Its dictionaries are new ones: to change what they have, set ``optimizer.state``.
        """
        self._follow_parameters()
        of = {id(master): parameter for parameter, master in self._pairs}
        found: defaultdict[Tensor, StateDict] = defaultdict(dict)
        for stepped, state in self.inner.state.items():
            found[of.get(id(stepped), stepped)] = dict(state)
        for parameter, master in self._pairs if found else []:
            found[parameter] |= self._own(parameter, master)
        return found

    @state.setter
    def state(self, value: Mapping[Tensor, StateDict]) -> None:
        """Give the inner optimizer another state, such as an empty one, from which its next step begins anew."""
        if "param_groups" not in self.__dict__:
            return  # torch's base class, before there is anything to lose
        of = {id(parameter): master for parameter, master in self._pairs}
        self.inner.state = defaultdict(dict)
        for parameter, state in value.items():
            found = {name: one for name, one in state.items() if name not in ("master", "follows")}
            self.inner.state[of.get(id(parameter), parameter)] = found

    def _own(self, parameter: Tensor, master: Tensor) -> StateDict:
        """Return a parameter's entries in a state dict besides the inner optimizer's."""
        return {"master": master.detach(), "follows": follows_from_master(parameter)}

    def _share_groups(self) -> None:
        """Show the inner optimizer's options, which its steps may write, in the groups that schedulers write."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in inner.items():
                if name != "params":
                    outer[name] = value

    def _push_options(self) -> None:
        # Schedulers, and users, write the outer groups; the inner optimizer reads its own.
        of = {id(master): parameter for parameter, master in self._pairs}
        known = [[id(of.get(id(p), p)) for p in g["params"]] for g in self.inner.param_groups]
        if known != [[id(p) for p in group["params"]] for group in self.param_groups]:
            raise RuntimeError(
                "MasterWeights: param_groups have other parameters than when they were made; make another "
                "MasterWeights, or add parameters by add_param_group"
            )
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})

    def __getstate__(self) -> StateDict:
        """Return the state for copies and pickles, with the masters and the inner optimizer."""
        self._follow_parameters()
        state = {name: value for name, value in super().__getstate__().items() if name != "state"}
        return {**state, "inner": self.inner, "_pairs": self._pairs}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        for parameter, master in self._pairs:
            set_master(parameter, master, follows=False)

    def masters(self) -> dict[Tensor, Tensor]:
        """Return the fp32 master of each persistent parameter.

        To change values write them into the parameter, which sets its master: what is written into a master reaches
        the parameter with the next step that has a gradient for it.
        """
        self._follow_parameters()
        return dict(self._pairs)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the masters with the parameters' gradients, then write every persistent parameter back.

        Args:
            closure: Computes the loss and its gradients. Where the optimizer evaluates it several
                times, as LBFGS does, parameters follow their masters each time. If parameters are
                sharded, what it raises on one rank is raised on all.

        Raises:
            TypeError: If ``closure`` is not a function.
        """
        require_function("MasterWeights.step", "closure", closure)
        self._follow_parameters()
        warn_of_rounded(parameter for parameter, _ in self._pairs)
        evaluate = () if closure is None else (self._following(closure),)
        self._push_options()
        if not evaluate:
            self._take_gradients()
        try:
            return self.inner.step(*evaluate)
        finally:  # a step that raises may have written some masters
            self._share_groups()
            self._write_back(self._stepped_pairs())
            for parameter, master in self._pairs:
                master.grad = None
                persistent_part(parameter).high_precision.loaded = False

    def __getattr__(self, name: str) -> Callable[..., object]:
        """Return a public method that the inner optimizer alone has, such as ``eval`` of schedule-free optimizers: it
        gets masters and gradients, and the parameters are quantized after it."""
        method = None if name.startswith("_") else getattr(self.__dict__.get("inner"), name, None)
        if not inspect.ismethod(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._run, method)

    def _run(self, method: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        self._follow_parameters()
        warn_of_rounded(parameter for parameter, _ in self._pairs)
        self._push_options()
        self._take_gradients()
        try:
            return method(*args, **kwargs)
        finally:
            self._share_groups()
            # Not by versions: those of ``p.data``, which many write, are not the masters'
            self._write_back([pair for pair in self._pairs if pair[0].requires_grad])
            for parameter, master in self._pairs:
                parameter.grad = None if master.grad is None else parameter.grad
                master.grad = None

    def _following(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Wrap a closure so that each evaluation quantizes the parameters from the present masters."""
        everywhere = raising_everywhere(closure, [parameter for parameter, _ in self._pairs])

        def evaluate() -> float:
            self._share_groups()
            self._write_back(self._stepped_pairs())  # none yet at the first evaluation
            with torch.enable_grad():
                loss = everywhere()
            self._push_options()
            self._take_gradients()
            return loss

        return evaluate

    def _take_gradients(self) -> None:
        """Assign the parameters' gradients to the masters."""
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    def _stepped_pairs(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Return the pairs that have a gradient and a nonzero learning rate."""
        still = {
            id(p)
            for group in self.inner.param_groups
            if is_zero(group.get("lr")) and not isinstance(self.inner, _RATES_OF_THEIR_OWN)
            for p in group["params"]
        }
        return [
            pair for pair in self._pairs if pair[1].grad is not None and id(pair[1]) not in still
        ]

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Recreate the masters of parameters that were replaced, or that another optimizer steps."""
        pairs = [(persistent_part(parameter), local(master)) for parameter, master in self._pairs]
        replaced = [(part, own) for part, own in pairs if not part.high_precision.is_of(own)]
        # First: what stood there before may stand in another parameter now, or come back (torch.utils.swap_tensors).
        for _, own in replaced:
            before = values_in(own)
            if before is not None:
                before.keep_values()
        for part, own in replaced:
            rounded = False
            if not part.high_precision.was_of(own):
                rounded = part.known_values is None
                own.copy_(high_precision_values(part))
            set_master(part, own, follows=part.high_precision.follows)
            part.high_precision.rounded = rounded

    def _write_back(self, pairs: list[tuple[Tensor, nn.Parameter]]) -> None:
        """Quantize masters into their parameters, all at once, because ranks exchange scales."""
        refresh_all_([(persistent_part(p), local(master.detach())) for p, master in pairs])
        for parameter, master in pairs:
            set_master(parameter, master, follows=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with masters where they are persistent."""
        if not hasattr(self, "inner") or len(self.param_groups) < len(self.inner.param_groups):
            super().add_param_group(param_group)  # called by the base class while it is being built
            return
        group = checked_group("MasterWeights.add_param_group", param_group)
        self._push_options()
        super().add_param_group(dict(group))  # which raises for parameters that are there
        count = len(self._pairs)
        try:
            stepped = [self._stepped(p) for p in group["params"]]
            self.inner.add_param_group({**group, "params": stepped})
        except BaseException:
            self.param_groups.pop()
            del self._pairs[count:]
            raise
        self._share_groups()
        self._set_masters(self._pairs[count:])

    def state_dict(self) -> StateDict:
        """Return the inner optimizer's state dict, and with each persistent parameter its master
        and ``"follows"``: whether the parameter is what quantizing it gives, at any time.
        """
        # The base class runs these hooks, which are private to torch, in the method overridden
        # here; left out, hooks that users register would not run
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._follow_parameters()
        self._push_options()
        packed = self.inner.state_dict()
        state, keys = packed["state"], self._keys(packed)
        for (parameter, master), key in zip(self._pairs, keys, strict=True):
            state[key] = {**state.get(key, {}), **self._own(parameter, master)}
        for key in (key for group in packed["param_groups"] for key in group["params"] if keys):
            state.setdefault(key, {})  # torch wants all of them or none
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = _or(after(self, packed), packed)
        return packed

    def _keys(self, packed: StateDict) -> list[int | str | None]:
        """Return the keys of parameters with masters in a state dict (indices or names), in this optimizer's order."""
        keys = [key for group in packed["param_groups"] for key in group["params"]]
        every = [id(p) for group in self.inner.param_groups for p in group["params"]]
        of = dict(zip(every, keys, strict=False))
        return [of.get(id(master)) for _, master in self._pairs]

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` gave, and quantize every persistent parameter that followed from its master.

        Parameters that did not, such as frozen ones and those with delayed scales, come with the
        model's state, which may be loaded before or after this.

        Frozen ones may have no master there, because torch's ``get_optimizer_state_dict`` leaves them out.

        Raises:
            TypeError: If it is no state dict of an optimizer.
            ValueError: If groups or masters do not fit the parameters.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(hook(self, state_dict), state_dict)
        check_groups(state_dict, self.param_groups)
        # Copies, from which ``master`` and ``follows`` are taken out: the caller's state dict stays whole.
        state = {key: dict(of_one) for key, of_one in state_dict["state"].items()}
        own = [state.get(key, {}) for key in self._keys(state_dict)]
        loaded = [(of_one.pop("master", None), of_one.pop("follows", False)) for of_one in own]
        self._check_masters([values for values, _ in loaded])
        self._follow_parameters()  # masters are written here, which may be those of weights elsewhere
        self.inner.load_state_dict(
            {**state_dict, "state": {key: of_one for key, of_one in state.items() if of_one}}
        )
        self._share_groups()
        pairs = zip(self._pairs, loaded, strict=True)
        found = [(*pair, *new) for pair, new in pairs if new[0] is not None]
        with torch.no_grad():
            for _, master, values, _ in found:
                master.copy_(values)
            # After all masters: faces follow from them, and weights with a common scale from one another's.
            self._write_back(
                [(parameter, master) for parameter, master, _, follows in found if follows]
            )
        for parameter, master, _, follows in found:
            set_master(parameter, master, follows=bool(follows), loaded=True)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check_masters(self, loaded: list[Tensor | None]) -> None:
        """Raise ValueError unless a state dict has a master of every trainable parameter, in its shape."""
        shapes = [None if values is None else tuple(values.shape) for values in loaded]
        wanted = [tuple(master.shape) for _, master in self._pairs]
        for (parameter, _), shape, needed in zip(self._pairs, shapes, wanted, strict=True):
            if shape != needed and (shape is not None or parameter.requires_grad):
                raise ValueError(
                    f"MasterWeights.load_state_dict: masters of {wanted} are required, got "
                    f"{shapes}; give it the state of an optimizer of the same parameters"
                )


# Their rates are in their states; a group's ``lr`` is where these begin
_RATES_OF_THEIR_OWN = (torch.optim.Rprop, torch.optim.ASGD)


def _or(new: T | None, old: T) -> T:
    return old if new is None else new
