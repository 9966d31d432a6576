"""Keys of torch's on-disk graph caches: graphs traced by another version of this package are not reused."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch.compiler import config

from hybridtensor.version import __version__


def digest_of(folder: Path) -> str:
    """Return a digest of the source files in a folder, which change between versions, too."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


SOURCES = digest_of(Path(__file__).parent)
"""The digest of this package."""


def tell_caches() -> None:
    """Add version and sources to the tag of all of torch's caches of compiled graphs."""
    # AOTAutograd's cache knows a layer by Dynamo's graph, in which ``F.linear`` is whatever the weight's class makes of
    # it: a graph that another version traced would be run as it is.
    own = f"hybridtensor {__version__} {SOURCES}"
    if own not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {own}".strip()


tell_caches()
