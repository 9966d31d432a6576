"""Low-precision training in PyTorch where each matrix product may have its own number format."""

from typing import TYPE_CHECKING

from hybridtensor import lazy
from hybridtensor.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from hybridtensor.public import *  # noqa: F403
    from hybridtensor.public import __all__  # noqa: F401

lazy.install()
