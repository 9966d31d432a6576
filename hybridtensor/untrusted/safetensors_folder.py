"""A folder of safetensors that is read: which files it has, what they were when they were written, and their tensors.

Links are followed inside the folder, and where the cache of the Hugging Face hub has them: its folders
``models--NAME/snapshots/COMMIT`` hold links into ``models--NAME/blobs``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from hybridtensor.untrusted.files import digest_file, read_json

CONFIG = "config.json"
DIGESTS = "digests.json"
INDEX = "model.safetensors.index.json"
_CACHES = ("models--", "datasets--")
_METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "mxfp4")  # with elements as here
_SIDE = 128  # of the blocks of "fp8"
_LIMIT = 1 << 28  # some hundred bytes per tensor, and per file
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError)


class Folder:
    """The tensors of a folder, read one by one.

    Args:
        who: The caller, for errors.
        library: The package safetensors.
        path: The folder, which may be a link.

    Raises:
        ValueError: If the folder is not there, a file is not what was written, no regular file, or elsewhere.
    """

    def __init__(self, who: str, library: ModuleType, path: Path) -> None:
        self._who, self._library, self._files = who, library, contextlib.ExitStack()
        self._of: dict[str, Any] = {}
        self._file: dict[str, str] = {}
        self._path = path
        self.used: set[str] = set()
        self._taken: list[str] = []  # for one parameter
        try:
            self._open(path)
        except BaseException:
            self.close()  # an error that is kept would keep files open
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        self._taken.append(name)
        with self._reading(name):
            tensor: Tensor = self._of[name].get_tensor(name)
        return tensor

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Have damage of a file end in a ValueError that names the file, or the tensor."""
        try:
            yield
        except (self._library.SafetensorError, OSError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"{self._who}: {what} as safetensors writes it is required in {self._path}, got damage: {error}"
            ) from error

    @contextlib.contextmanager
    def naming_files(self) -> Iterator[None]:
        """Have a ValueError name the files of the tensors that were taken meanwhile."""
        self._taken.clear()
        try:
            yield
        except ValueError as error:
            files = sorted({self._file[name] for name in self._taken})
            raise ValueError(f"{error}; read from {', '.join(files)} in {self._path}") from error

    @property
    def unused(self) -> list[str]:
        """Names that nobody took."""
        return sorted(self._of.keys() - self.used)

    @property
    def files(self) -> list[str]:
        return sorted(set(self._file.values()))

    def _open(self, path: Path) -> None:
        """Check a folder, and open its files."""
        who = self._who
        if not path.is_dir():
            raise ValueError(
                f"{who}: a folder on this machine is required, got {str(path)!r}; export or download it first"
            )
        path, opened = path.resolve(), self._library.safe_open
        listed = self._check_digests(path)
        self._check_config(path)
        names, indexed = self._names(path)
        for name in names:
            if listed is not None and name not in listed:
                raise ValueError(
                    f"{who}: files of {DIGESTS} are required, got {name} besides; remove it"
                )
            file = _regular(who, path, name)
            with self._reading(name):
                handle = self._files.enter_context(opened(str(file), framework="pt"))
            twice = sorted(self._of.keys() & set(handle.keys()))
            if twice:
                raise ValueError(
                    f"{who}: each tensor in one file is required, got {twice[:3]} in {name} and another"
                )
            self._of |= dict.fromkeys(handle.keys(), handle)
            self._file |= dict.fromkeys(handle.keys(), name)
        if indexed is not None:
            self._check_index(path, indexed)

    def _check_digests(self, path: Path) -> set[str] | None:
        """Return the names of files that are what was written, or None where nobody wrote down what they are.

        Raises:
            ValueError: If a file is not what was written.
        """
        if not os.path.lexists(path / DIGESTS):
            return None
        file = _regular(self._who, path, DIGESTS)
        try:
            files = read_json(file.parent, file.name, _LIMIT)["files"]
            known = {
                _plain(name): (int(entry["size"]), str(entry["sha256"]))
                for name, entry in files.items()
            }
        except _DAMAGE as error:
            raise ValueError(
                f"{self._who}: {DIGESTS} as export_pretrained writes it is required in {path}, got {error!r}"
            ) from error
        for name, (size, sha256) in known.items():
            file = _regular(self._who, path, name, f", as {DIGESTS} lists it,")
            if digest_file(file, size=size) != (size, sha256):
                raise ValueError(
                    f"{self._who}: {path / name} as it was written is required, got other bytes than {DIGESTS} has of "
                    "it; copy or export it again"
                )
        return set(known)

    def _check_config(self, path: Path) -> None:
        """Raise ValueError for a configuration that says of the tensors what they cannot be here."""
        if not os.path.lexists(path / CONFIG):
            return
        file = _regular(self._who, path, CONFIG)
        try:
            settings = read_json(file.parent, file.name, _LIMIT, infinite=True).get(
                "quantization_config"
            )
            method = None if settings is None else settings["quant_method"]
            block = None if settings is None else settings.get("weight_block_size")
        except _DAMAGE as error:
            raise ValueError(
                f"{self._who}: {CONFIG} as transformers writes it is required in {path}, got {error!r}"
            ) from error
        if method is not None and method not in _METHODS:
            raise ValueError(
                f"{self._who}: a quant_method of {', '.join(_METHODS)} is required in {path / CONFIG}, got "
                f"{method!r:.80}; load a folder that export_pretrained wrote, or one in FP8 or MXFP4"
            )
        if block not in (None, [_SIDE, _SIDE]):
            raise ValueError(
                f"{self._who}: a weight_block_size of {[_SIDE, _SIDE]} is required in {path / CONFIG}, got "
                f"{block!r:.80}"
            )

    def _check_index(self, path: Path, indexed: dict[str, str]) -> None:
        """Raise ValueError unless an index has each tensor with its file."""
        for name in sorted(indexed.keys() | self._file.keys()):
            said, found = indexed.get(name), self._file.get(name)
            if said != found:
                raise ValueError(
                    f"{self._who}: an index that has each tensor with its file is required, got {name!r:.200} in "
                    f"{said or 'no file'} by {INDEX}, and in {found or 'no file'} of {path}; download the folder "
                    "again, or remove the index, and all files are read"
                )

    def _names(self, path: Path) -> tuple[list[str], dict[str, str] | None]:
        """Return the names of the files with tensors, and which has which by the index, if there is one."""
        indexed = None
        if os.path.lexists(path / INDEX):
            file = _regular(self._who, path, INDEX)
            try:
                found = read_json(file.parent, file.name, _LIMIT)["weight_map"].items()
                indexed = {str(name): _plain(file) for name, file in found}
                names = sorted(set(indexed.values()))
            except _DAMAGE as error:
                raise ValueError(
                    f"{self._who}: an index with a weight_map is required, got {error!r} in {path / INDEX}"
                ) from error
        else:
            names = sorted(file.name for file in path.glob("*.safetensors"))
        absent = [name for name in names if not os.path.lexists(path / name)]
        if absent or not names:
            listed = f", as {INDEX} lists them" if os.path.lexists(path / INDEX) else ""
            raise ValueError(
                f"{self._who}: files of safetensors are required in {path}{listed}, got none or without {absent[:5]}"
            )
        return names, indexed


def _plain(name: object) -> str:
    """Take the name of a file in the folder."""
    if type(name) is not str or Path(name).name != name:
        raise ValueError(f"{name!r:.80} is no name of a file in the folder")
    return name


def _regular(who: str, folder: Path, name: str, why: str = "") -> Path:
    """Return the regular file that a name in a folder, itself no link, leads to.

    Raises:
        ValueError: If there is none, or it is neither in the folder nor among the blobs of its cache.
    """
    try:
        file = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, names with a zero
        raise ValueError(
            f"{who}: a file {name}{why} is required in {folder}, got none, or a link to none: {error}"
        ) from error
    if not any(file.is_relative_to(place) for place in (folder, *_blobs(folder))):
        raise ValueError(
            f"{who}: {name} in {folder}, or in the blobs of its cache, is required, got a link to {file}; copy the "
            "file into the folder"
        )
    if not stat.S_ISREG(file.lstat().st_mode):  # nobody waits for who writes into a pipe
        raise ValueError(
            f"{who}: a regular file is required, got {name} in {folder}, which is none"
        )
    return file


def _blobs(folder: Path) -> list[Path]:
    """Return where the cache that a snapshot, or a folder of it, belongs to has its files; none of other folders."""
    snapshots = [one.parent for one in (folder, *folder.parents) if one.parent.name == "snapshots"]
    caches = [one.parent for one in snapshots if one.parent.name.startswith(_CACHES)]
    return [cache / "blobs" for cache in caches[:1]]
