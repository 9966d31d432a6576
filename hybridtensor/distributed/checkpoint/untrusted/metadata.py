"""The metadata of ``torch.distributed.checkpoint``, a pickle, read without running what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hybridtensor.distributed.checkpoint.untrusted.files import read_file
from hybridtensor.distributed.checkpoint.untrusted.records import read_records

PathItem = TypeVar("PathItem", str, int)

METADATA = ".metadata"
_LIMIT = 1 << 30  # some hundred bytes per part of a tensor on a rank
_FORMER_NAMES = {"quantization_state.scale": "quantization_state.encode_scale"}


def read_metadata(path: Path, files: Mapping[str, tuple[int, str]] | None = None) -> Metadata:
    """Read the metadata of the checkpoint in the folder ``path``.

    Args:
        path: The folder.
        files: Size and digest of the files that it may point to; None is any inside the folder.

    Raises:
        ValueError: If it asks for anything that metadata is not made of, is no metadata, or points
            elsewhere.
        OSError: If it cannot be read.
    """
    try:
        metadata = read_records(read_file(path, METADATA, _LIMIT))
        for info in metadata.storage_data.values():
            name = info.relative_path
            if Path(name).name != name or (files is not None and name not in files):
                raise ValueError(f"it points to {name[:100]!r}, which is no file of the checkpoint")
            if files is not None and info.offset + info.length > files[name][0]:
                raise ValueError(f"it points behind the end of {name}")
    except ValueError as error:
        raise ValueError(f"{path / METADATA}: {error}") from error
    use_present_names(metadata)
    return metadata


def use_present_names(metadata: Metadata) -> None:
    """Give tensors that a former version stored under another name the present one, in place."""
    # ``planner_data`` is private to torch's planners: the path of each flat name. A torch that
    # keeps something else there leaves former names as they are, and loading them says what is
    # missing.
    stored = metadata.state_dict_metadata
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    renamed = {old: _present_name(old) for old in stored if _present_name(old) != old}
    for old, new in renamed.items():
        stored[new] = stored.pop(old)
        if old in paths:
            *holders, last = paths.pop(old)
            paths[new] = (*holders, _present_name(last))
    if not renamed:
        return
    for index in [index for index in metadata.storage_data or {} if index.fqn in renamed]:
        info = metadata.storage_data.pop(index)
        metadata.storage_data[dataclasses.replace(index, fqn=renamed[index.fqn])] = info


def _present_name(name: PathItem) -> PathItem:
    for former, present in _FORMER_NAMES.items():
        if isinstance(name, str) and name.endswith(former):
            return name.removesuffix(former) + present
    return name


class Writer(FileSystemWriter):
    """``FileSystemWriter`` whose metadata does not say where it was written: the folder is renamed."""

    def storage_meta(self) -> StorageMeta | None:
        """See ``StorageWriter``."""
        return StorageMeta(save_id=self.save_id)
