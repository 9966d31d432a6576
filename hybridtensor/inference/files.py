"""Folders that engines and transformers load: safetensors files with an index, and ``config.json``.

Needs the package ``safetensors``: ``pip install hybridtensor[export]``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_int, require_module, require_path
from hybridtensor.inference.config import inference_config
from hybridtensor.inference.layouts import AUTO, Settings
from hybridtensor.inference.names import unwrapped
from hybridtensor.inference.tensors import BUCKET, Wanted, tensors_for
from hybridtensor.ranks import TIMEOUT, together
from hybridtensor.state.contract import is_first_rank
from hybridtensor.untrusted.files import digest_file, own_folder, sync_folder
from hybridtensor.untrusted.safetensors_files import safetensors, save_file
from hybridtensor.untrusted.safetensors_folder import CONFIG, DIGESTS, INDEX
from hybridtensor.version import __version__

_SHARD = 5 * 10**9
_VERSION = 1


def export_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: str = AUTO,
    *,
    experts: str = "separate",
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = _SHARD,
    bucket_bytes: int = BUCKET,
    static_inputs: bool = False,
    timeout: datetime.timedelta = TIMEOUT,
) -> Path:
    """Write what ``inference_tensors`` gives into a folder, which is there whole or not at all.

    ::

        ht.export_pretrained(model, "exported")

    Files ``model-00001-of-00003.safetensors`` with their index, ``config.json`` (that of a model of transformers, with
    the quantization) and ``digests.json``: size and SHA-256 of every file, which ``load_pretrained`` checks. Of a
    sharded model, all ranks call it, and the first one writes.

    Args:
        model: Any model.
        folder: Which is not there yet; its parent is.
        layout: See ``inference_tensors``.
        experts: See ``inference_tensors``.
        dtype: See ``inference_tensors``.
        shard_bytes: How large a file may be; one with a larger tensor is.
        bucket_bytes: See ``inference_tensors``.
        static_inputs: See ``inference_tensors``.
        timeout: How long to wait for the slowest rank of a sharded model.

    Returns:
        The folder, which is there on return; of a sharded model on the first rank.

    Raises:
        ImportError: If ``safetensors`` is not installed.
        TypeError: If an argument is of the wrong kind.
        ValueError: If the folder is there, or no layout holds a weight, or names collide.
        NotImplementedError: For a stage of a pipeline.
        OSError: If a file cannot be written; of a sharded model RuntimeError, on every rank.
    """
    who = "export_pretrained"
    require_module(who, model)
    first = is_first_rank(who, model)
    everyone = together(who, model, timeout)
    library, target = everyone(lambda: _given(who, folder, shard_bytes, first))
    wanted = Wanted(layout, experts, dtype, bucket_bytes, "first", static_inputs)
    tensors = tensors_for(who, model, timeout, wanted)
    make = partial(inference_config, model, layout, experts=experts, static_inputs=static_inputs)
    config = everyone(lambda: _config(model, make(), dtype))
    with contextlib.ExitStack() as stack:
        made = _written(stack, library, target, tensors, shard_bytes) if first else None
        collections.deque(tensors, maxlen=0)  # other ranks wait in their gathers until all are done
        everyone(lambda: None if made is None else _finished(who, made, target, config))
    return target


def _given(
    who: str, folder: str | os.PathLike[str], shard_bytes: int, first: bool
) -> tuple[ModuleType, Path]:
    """Return the package safetensors and the folder, after checking arguments; the first rank looks at the disk."""
    require_path(who, folder)
    require_int(who, at_least=1, shard_bytes=shard_bytes)
    if first:
        _check_new(who, Path(folder))
    return safetensors(who), Path(folder)


def _written(
    stack: contextlib.ExitStack,
    library: ModuleType,
    target: Path,
    tensors: Iterator[tuple[str, Tensor]],
    most: int,
) -> Path | Exception:
    """Make a folder with all tensors, which goes with ``stack``, and return it, or the error that was raised
    meanwhile, for other ranks wait.
    """
    try:
        folder = stack.enter_context(own_folder(target)) / target.name
        folder.mkdir()
        _write_files(library, folder, tensors, most)
    except Exception as error:
        return error
    return folder


def _finished(who: str, made: Path | Exception, target: Path, config: Settings) -> None:
    """Write everything else and give the folder its name, or raise the error that there was."""
    if isinstance(made, Exception):
        raise made
    _write_rest(made, config)
    _move(who, made, target)


def _check_new(who: str, target: Path) -> None:
    """Raise unless the folder can be made."""
    if target.exists() or target.is_symlink():
        raise ValueError(
            f"{who}: a folder that is not there is required, got {target}; name another, or remove it"
        )
    if not target.parent.is_dir():
        raise ValueError(
            f"{who}: a folder whose parent is there is required, got {target}; make {target.parent}"
        )


def _write_files(
    library: ModuleType, folder: Path, tensors: Iterator[tuple[str, Tensor]], most: int
) -> None:
    """Write tensors into files, and the index of several."""
    names: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, most):
        part = folder / f"{len(names)}.part"
        save_file("export_pretrained", library, shard, part, {"format": "pt"})
        names.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    # Their number is part of the files' names, and known only once all tensors came.
    count = len(names)
    files = [
        "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
        for i in range(count)
    ]
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
    if count > 1:
        of = {name: file for some, file in zip(names, files, strict=True) for name in some}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": of})


def _shards(tensors: Iterator[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors on the host, as many at a time as a file holds; one file at least."""
    shard: dict[str, Tensor] = {}
    nbytes = 0
    for name, tensor in tensors:
        if shard and nbytes + tensor.nbytes > most:
            yield shard
            shard, nbytes = {}, 0
        # ``copy=True``: what is yielded may alias a cached face, and is written when the file is
        # full.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        nbytes += tensor.nbytes
    yield shard


def _config(model: nn.Module, quantization: Settings, dtype: torch.dtype) -> Settings:
    inner = unwrapped(model)
    to_dict = getattr(getattr(inner, "config", None), "to_dict", None)
    config: Settings = {}
    if callable(to_dict):
        config = copy.deepcopy(to_dict())
        config["architectures"] = [type(inner).__name__.removeprefix("FSDP")]
        config["dtype"] = str(dtype).removeprefix("torch.")
    if quantization:
        config["quantization_config"] = quantization
        if "expert_dtype" in {**config, **quantization}:  # engines look for it beside
            config["expert_dtype"] = quantization.get("expert_dtype", "fp8")
    return config


def _write_rest(folder: Path, config: Settings) -> None:
    """Write the configuration, and the digests of all files, and bring everything to the disk."""
    _write_json(folder / CONFIG, config)
    files = {}
    for path in sorted(folder.iterdir()):
        size, sha256 = digest_file(path, sync=True)
        files[path.name] = {"size": size, "sha256": sha256}
    _write_json(
        folder / DIGESTS, {"version": _VERSION, "hybridtensor": __version__, "files": files}
    )
    digest_file(folder / DIGESTS, sync=True)
    sync_folder(folder)


def _move(who: str, partial: Path, target: Path) -> None:
    """Give the folder its name, unless somebody else made one meanwhile."""
    # Once more: ``rename`` would replace an empty folder of that name without an error.
    _check_new(who, target)
    partial.rename(target)
    sync_folder(target.parent)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
