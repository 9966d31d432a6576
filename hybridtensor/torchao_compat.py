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


_silently()

from torchao.core.config import AOBaseConfig, config_from_dict, config_to_dict  # noqa: E402
from torchao.quantization import FqnToConfig  # noqa: E402
from torchao.quantization.transform_module import register_quantize_module_handler  # noqa: E402

__all__ = [
    "AOBaseConfig",
    "FqnToConfig",
    "config_from_dict",
    "config_to_dict",
    "register_quantize_module_handler",
]
