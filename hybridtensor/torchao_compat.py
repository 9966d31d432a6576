"""What this library uses of torchao, imported without torchao's own start-up messages."""

from __future__ import annotations

import logging
import warnings


def _silently() -> None:
    """Import torchao without its messages about optional binaries."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.quantization  # noqa: F401
    finally:
        logging.disable(previous)


# At once, not when it is first used: torchao's quantize_ and config_from_dict must know this library's config in
# whatever order both are imported, and torchao has no entry point that would ask for it.
_silently()

from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig, config_from_dict, config_to_dict  # noqa: E402
from torchao.quantization import FqnToConfig  # noqa: E402
from torchao.quantization.transform_module import register_quantize_module_handler  # noqa: E402

__all__ = [
    "ALLOWED_AO_MODULES",
    "AOBaseConfig",
    "FqnToConfig",
    "config_from_dict",
    "config_to_dict",
    "register_quantize_module_handler",
]
