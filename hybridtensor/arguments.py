"""Checks of arguments, one per kind, for every public function.

All raise TypeError for another kind, and ValueError for an impossible value, as
``who: what is required, got what; what to do``.
"""

from __future__ import annotations

import datetime
import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
Given = TypeVar("Given", bound=Mapping[str, object])
_LONGEST = 120  # characters of a value that an error shows


def shown(value: object) -> str:
    """Describe a value in an error message, without the elements of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    if isinstance(value, nn.Module):
        return f"the module {type(value).__name__}"
    text = repr(value)
    if "\n" in text:  # a table, or something with modules or tensors in it
        return f"a value of {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def wrong(who: str, required: str, value: object, advice: str = "") -> TypeError:
    """Return the error of a value of another kind than is required."""
    return TypeError(f"{who}: {required} is required, got {shown(value)}{advice and f'; {advice}'}")


def require_kind(
    who: str, what: str, value: object, kind: type | tuple[type, ...], advice: str = ""
) -> None:
    """Raise TypeError unless ``value`` is of a class, or one of several, which ``what`` names."""
    if not isinstance(value, kind):
        raise wrong(who, what, value, advice)


def require_module(who: str, model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: a module is required, got {type(model).__name__}")


def require_flag(who: str, /, **flags: object) -> None:
    """Raise TypeError unless every flag is a bool, because a string such as "no" is truthy."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{who}: {name} is True or False, got {shown(value)}")


def require_int(who: str, /, *, at_least: int | None = None, **numbers: object) -> None:
    """Raise unless every number is an integer, and none less than ``at_least``."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(who, f"an integer as {name}", value)
        if at_least is not None and value < at_least:
            raise ValueError(f"{who}: {at_least} or more is required as {name}, got {value}")


def require_number(who: str, /, **numbers: object) -> None:
    """Raise unless every number is one from 0 on."""
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise wrong(who, f"a number as {name}", value)
        if math.isnan(value) or value < 0:
            raise ValueError(f"{who}: 0 or more is required as {name}, got {value}")


def require_text(who: str, /, **texts: object) -> None:
    """Raise TypeError unless all are strings."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise wrong(who, f"a string as {name}", value)


def require_choice(who: str, what: str, word: object, known: Iterable[str]) -> None:
    """Raise ValueError unless ``word`` is one of ``known``, with the nearest."""
    words = tuple(known)
    if not isinstance(word, str) or word not in words:
        raise ValueError(f"{who}: unknown {what} {shown(word)}; {nearest(str(word), words)}")


def nearest(word: str, known: Iterable[object]) -> str:
    """Return advice for a misspelt word: the nearest known word, and the whole list."""
    words = [str(k) for k in known]
    lower = {k.lower(): k for k in words}
    close = difflib.get_close_matches(word[:_LONGEST].lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean {lower[close[0]]!r}? " if close else ""
    return f"{hint}known: {', '.join(words)}"


def require_function(who: str, what: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a function, or None."""
    if value is not None and not (callable(value) and not isinstance(value, (type, nn.Module))):
        raise wrong(who, f"a function as {what}", value)


def require_items(who: str, what: str, values: object, advice: str = "") -> list[Any]:
    """Return the items of an iterable; raise TypeError for strings, tensors, dictionaries and non-iterables."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Tensor, dict)):
        raise wrong(who, what, values, advice)
    return list(values)


def reusable(options: Given) -> Given:
    """Return arguments by name for several calls: iterators, which are empty after the first, as lists."""
    return {  # type: ignore[return-value]
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in options.items()
    }


def require_group(who: str, group: object) -> None:
    """Raise TypeError unless ``group`` is a process group, or None for all ranks."""
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise wrong(who, "a process group, or None for all ranks,", group)


def require_timeout(who: str, timeout: object) -> None:
    """Raise unless ``timeout`` is a span of time."""
    require_kind(who, "a datetime.timedelta as timeout", timeout, datetime.timedelta)
    if isinstance(timeout, datetime.timedelta) and timeout <= datetime.timedelta(0):
        raise ValueError(f"{who}: a timeout longer than none is required, got {timeout}")


def require_path(who: str, path: object) -> None:
    """Raise TypeError unless ``path`` is one."""
    require_kind(who, "a path", path, (str, os.PathLike))


def require_file(who: str, path: object) -> Path:
    """Return the path of a file to write; raise TypeError if it is no path, ValueError if no file can be there."""
    require_path(who, path)
    wanted = Path(path)  # type: ignore[arg-type]
    file = next((one for one in wanted.parents if one.is_file()), None)
    why = "a folder" if wanted.is_dir() else f"where {file} is a file" if file else ""
    if why:
        raise ValueError(
            f"{who}: the path of a file is required, got {wanted}, {why}; name another"
        )
    return wanted


def require_shape(who: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor, called ``name``, of a lazy layer that never ran."""
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{who}: {name} is of a lazy layer that never ran; run the model once")


def require_memory(who: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor, called ``name``, on the meta device, or of a lazy layer that never ran."""
    require_shape(who, name, tensor)
    if tensor.is_meta:
        raise ValueError(
            f"{who}: {name} is on the meta device, without values; call to_empty and load them first"
        )


def require_in_range(who: str, name: str, parameter: Tensor, values: Tensor) -> Tensor:
    """Return the exported values of a parameter; raise ValueError if some are in fp16 and too large for it.

    Those of buffers may be: masks are filled with the largest number of a dtype, for which infinity serves as well.
    """
    is_half = values.dtype == torch.float16 and isinstance(parameter, torch.nn.Parameter)
    if is_half and bool(values.isinf().any()):
        raise ValueError(
            f"{who}: {name}: values up to 65504 are required in float16, got {int(values.isinf().sum())} others of "
            f"{values.numel()}; choose bfloat16"
        )
    return values


def place(who: str, device: object) -> torch.device:
    """Return a device from a device or its name; raise TypeError or ValueError for anything else."""
    if not isinstance(device, (str, torch.device)):
        raise wrong(who, "a device or its name", device)
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"{who}: a device is required, got {shown(device)}; name one such as 'cpu' or 'cuda:0'"
        ) from None


def require_loss(who: str, value: object, advice: str) -> Tensor:
    """Return a loss; raise TypeError unless it is a tensor of one real number."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise TypeError(
            f"{who}: a loss of one real number is required, got {shown(value)}{shape}; {advice}"
        )
    return value


def own_loss(output: object) -> object:
    """Return the loss that a model put into its output, as an attribute or an entry ``loss``; None without one."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    return found


def require_dtype(who: str, dtype: object) -> None:
    """Raise TypeError unless ``dtype`` is a floating-point dtype of at least two bytes."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise wrong(who, "a floating-point dtype", dtype, "choose one of 16 bits or more")


def require_tensor(who: str, x: object, *, rank: int | None = None) -> None:
    """Raise unless ``x`` is a dense tensor (of ``rank`` dimensions)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: a tensor is required, got {type(x).__name__}; pass a torch.Tensor")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"one of {x.layout}"
        raise TypeError(f"{who}: a dense tensor is required, got {kind}; make it dense")
    if rank is not None and x.dim() != rank:
        raise ValueError(
            f"{who}: {rank} dimensions are required, got shape {tuple(x.shape)}; flatten or "
            "unsqueeze it"
        )


def require_float(who: str, x: object, *, rank: int | None = None) -> None:
    """Raise unless ``x`` is a dense bf16, fp16 or fp32 tensor (of ``rank`` dimensions)."""
    if isinstance(x, Tensor) and x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{who}: bfloat16, float16 or float32 is required, got {x.dtype}; cast the tensor first"
        )
    require_tensor(who, x, rank=rank)
