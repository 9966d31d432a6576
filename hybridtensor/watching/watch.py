"""``watch``: measure quantization noise, underflow and saturation of a model while it trains."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtensor.arguments import (
    require_choice,
    require_function,
    require_int,
    require_items,
    require_kind,
    require_module,
    require_number,
    require_tensor,
    wrong,
)
from hybridtensor.printed import Printed, level_of_caller
from hybridtensor.state.training import to_host, training_of
from hybridtensor.subclasses.observing import observers
from hybridtensor.watching.ranks import Ranks, added_up, agree
from hybridtensor.watching.recording import Recording, machine
from hybridtensor.watching.records import FaceRow, Measured, Sample, sample_of
from hybridtensor.watching.sampling import Sampler
from hybridtensor.watching.sinks import sink_of
from hybridtensor.watching.sums import Numbers

if TYPE_CHECKING:
    from rich.table import Table

_LOSSES = 1024  # recorded losses, after which they are stacked into one tensor

Alarm = str | Callable[[str], object] | None


class _Pending(NamedTuple):
    """A measured sample being copied to the host; ``there`` is None on a CPU."""

    step: int
    measured: Measured
    there: torch.cuda.Event | None


class _EagerCode:
    """Runs compiled code eagerly while at least one watch measures: watches end in any order, and the stance that one
    finds may be another's."""

    def __init__(self) -> None:
        self._measuring, self._stance = 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if not self._measuring:
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        self._measuring += 1
        try:
            yield
        finally:
            self._measuring -= 1
            if not self._measuring:
                self._stance.close()


_eager_code = _EagerCode()


class watch(Printed):  # noqa: N801  (used as a function)
    """Measure the quantization error of each operand and product, in some steps of any training loop.

    ::

        with ht.watch(model, every=100) as watched:
            for batch in data:
                loss = model(batch).mean()
                watched.note(loss)
                loss.backward()
                optimizer.step()
        print(watched)

    A step ends when an optimizer of the model's parameters has stepped. The first step is measured, and then every
    ``every``-th; the other steps run no additional code. A measured step compares slices of the quantized operands
    with their high-precision values. A watched run computes the same bits as an unwatched one. Compiled code runs
    eagerly in measured steps (``torch.compiler.set_stance``), with the rounding of eager code. Steps of compiled
    optimizers, and replays of CUDA graphs, are not detected: call ``step()`` after them.

    A step measures one expert of each parameter: the next one that has tokens.

    Under data parallelism all ranks must watch, and their measurements are summed. Ranks with different layers, such
    as stages of a pipeline, are summed with those that have the same layers.

    Args:
        model: A model after ``quantize_``.
        every: Distance between two measured steps.
        rows: Maximum number of rows, or columns, measured of each operand; 128 or more.
        sinks: Receivers of samples, called one step later, on the first rank only: paths (JSON lines, in folders that
            are made), TensorBoard writers, W&B runs, Lightning loggers, functions of a ``Sample``.
        alarm: Action if a face is not finite or saturated: ``"warn"``, ``"raise"``, or a function of the message, which
            names layer, operand and step. It reports the first such face of a step, one step later.
        saturated: Minimum ``overflows%`` of a saturated face, in percent.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is too small, or no layer of the model is converted.
        RuntimeError: On all ranks, if they watch with different arguments or steps. If it is entered twice at a time.
        NotImplementedError: If the model is on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        rows: int = 256,
        sinks: Iterable[object] = (),
        alarm: Alarm = None,
        saturated: float = 1.0,
    ) -> None:
        require_module("watch", model)
        require_int("watch", at_least=1, every=every)
        require_int("watch", at_least=128, rows=rows)
        require_number("watch", saturated=saturated)
        if isinstance(alarm, str):
            require_choice("watch", "alarm", alarm, ("warn", "raise"))
        else:
            require_function("watch", "alarm", alarm)
        # Private to torch.compile: the model that its wrapper calls, by whose names layers are
        # known.
        self.model, self.every, self.rows = getattr(model, "_orig_mod", model), every, rows
        self.steps = 0
        self._read: list[tuple[int, float]] = []
        self._sinks = [
            sink_of(target) for target in require_items("watch", "a list of sinks", sinks)
        ]
        self._alarm, self._saturated = alarm, saturated
        self._samples: list[Sample] = []
        self._pending: list[_Pending] = []
        self._losses: list[tuple[int, Tensor]] = []
        self._packed: list[tuple[list[int], Tensor]] = []
        self._sampler: Sampler | None = None
        self._armed = contextlib.ExitStack()
        self._hooks, self._is_open = contextlib.ExitStack(), False
        self._ranks = Ranks()

    # -- the loop

    def __enter__(self) -> Self:
        if self._is_open:
            raise RuntimeError(
                "watch: this watch is entered already; leave its block first, or make another"
            )
        sampler, error = None, None
        try:
            sampler = Sampler(self.model, self.rows)
        except NotImplementedError as found:
            error = found
        layers = [] if sampler is None else list(sampler.layers.values())
        self._ranks = agree((self.every, self.rows, self.steps), self.model, layers, error)
        self._sampler = sampler
        callbacks = training_of(self.model).callbacks
        callbacks.append(self._after_optimizer)
        self._hooks.callback(callbacks.remove, self._after_optimizer)
        self._is_open = True
        self._arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_open = False
        self._hooks.close()
        self._armed.close()
        before, self._pending = self._pending, []
        # The last sample may show what the error comes from, which says more than an alarm. A device that failed gives
        # none.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(RuntimeError):
            self._flush(before, alarms=kind is None)

    def step(self) -> None:
        """End a step; call it only if no eager torch optimizer steps.

        Raises:
            RuntimeError: Outside of the block of ``with``.
        """
        if not self._is_open:
            raise RuntimeError(
                "watch.step: this watch is not entered, so that it measures nothing; call it in its block"
            )
        sampled = self._sampler is not None and self.steps % self.every == 0
        self._armed.close()
        before, self._pending = self._pending, []
        if sampled:
            self._take()
        self.steps += 1
        self._arm()
        self._flush(before)  # last: alarms may raise

    def note(self, loss: Tensor | float, *, step: int | None = None) -> None:
        """Record a loss for reports, without waiting for the device.

        Args:
            loss: Loss of one step: a number, or a tensor with one element.
            step: Number of the step, counted as in samples; by default the current one.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If the loss is more than one number, or the step below 0.
        """
        if step is not None:
            require_int("watch.note", at_least=0, step=step)
        if isinstance(loss, (int, float)) and not isinstance(loss, bool):
            loss = torch.tensor(float(loss), device="cpu")
        require_kind("watch.note", "a number or a tensor as loss", loss, Tensor)
        require_tensor("watch.note: loss", loss)
        value: Tensor = loss.detach()  # type: ignore[union-attr]
        if value.is_complex():
            raise wrong("watch.note", "a real number as loss", value, "pass its real part or abs()")
        if value.numel() != 1:
            raise ValueError(
                f"watch.note: a loss of one number is required, got shape {tuple(value.shape)}; pass its mean"
            )
        if self._losses and self._losses[-1][1].device != value.device:
            self._pack_losses()
        # A copy: loops add up losses in place, and each replay of a CUDA graph writes into the same memory
        value = value.reshape(()).to(torch.float32, copy=True)
        self._losses.append((self.steps if step is None else step, value))
        if len(self._losses) >= _LOSSES:
            self._pack_losses()

    def _pack_losses(self) -> None:
        """Stack the recorded losses on their device."""
        if self._losses:
            packed = torch.stack([value for _, value in self._losses])
            self._packed.append(([step for step, _ in self._losses], packed))
            self._losses = []

    def _after_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.step()

    def _arm(self) -> None:
        """Measure the next step, if it is due."""
        sampler = self._sampler
        if sampler is None or self.steps % self.every:
            return
        sampler.begin(self.steps // self.every)
        observers.append(sampler)
        self._armed.callback(observers.remove, sampler)
        self._armed.callback(sampler.end)
        # Observers are called from Python, which compiled code no longer runs.
        self._armed.enter_context(_eager_code.held())

    # -- samples

    def _take(self) -> None:
        """Reduce the measurements over ranks, and copy them to the host."""
        sampler = self._sampler
        if sampler is None:
            return
        numbers, sizes = added_up(sampler.sums, self._ranks)
        tensors, there = to_host([*numbers, sizes])
        if there is None:  # the next sample clears these sums in place
            tensors = [tensor.clone() for tensor in tensors]
        unseen, layers = dict(sampler.unseen), sampler.measured()
        measured = Measured(layers, list(sampler.order), unseen, Numbers(*tensors[:4]), tensors[4])
        self._pending.append(_Pending(self.steps, measured, there))

    def _flush(self, pending: list[_Pending], *, alarms: bool = True) -> None:
        """Read copied samples, pass them to sinks, and raise ``alarms``."""
        for one in pending:
            if one.there is not None:
                one.there.synchronize()  # the copy started one step ago
            sample = sample_of(one.step, one.measured)
            self._samples.append(sample)
            for sink in self._sinks if self._ranks.first else ():
                sink(sample)
            if alarms:
                self._tell(sample)

    def _tell(self, sample: Sample) -> None:
        """Raise the alarm if a face of a sample is not finite or saturated."""
        if self._alarm is None:
            return
        bad = {(row.layer, row.operand): row for row in sample.faces if self._is_bad(row)}
        place = next((place for place in sample.order if place in bad), next(iter(bad), None))
        if place is None:
            return
        found = bad[place].statistics
        what = (
            "is not finite"
            if found["nonfinite"]
            else f"is saturated: {found['overflows%']:.3g} % of it overflow"
        )
        text = f"watch: {bad[place].where}: the face {place[1]} ({bad[place].format}) {what}, in step {sample.step}"
        if self._alarm == "raise":
            raise RuntimeError(text)
        if callable(self._alarm):
            self._alarm(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=level_of_caller())

    def _is_bad(self, row: FaceRow) -> bool:
        return bool(row.statistics["nonfinite"]) or row.statistics["overflows%"] >= self._saturated

    # -- what was found

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples on the host. While the loop runs, the last sample is still being copied."""
        return tuple(self._samples)

    def scalars(self) -> dict[str, float]:
        """Return the numbers of the last sample as a flat dictionary, with keys ``layer/input.rowwise/sqnr``."""
        return self._samples[-1].scalars() if self._samples else {}

    def recording(self) -> Recording:
        """Return all samples and losses so far, for reports and files."""
        self._pack_losses()
        for steps, values in self._packed:
            self._read += zip(steps, values.tolist(), strict=True)
        self._packed = []
        layers = [] if self._sampler is None else self._sampler.measured()
        recipes = {layer.name: str(layer.config) for layer in layers}
        return Recording(self.every, recipes, machine(), tuple(self._read), self.samples)

    def __rich__(self) -> Table:
        return Recording(self.every, {}, {}, (), self.samples).__rich__()

    def show(self) -> None:
        """Print the last sample, the noisiest faces first, as ``print`` does (needs ``rich``)."""
        print(self)
