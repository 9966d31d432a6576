"""How Sphinx makes a site of these pages: ``make docs``."""

import re
from typing import Any

from sphinx.application import Sphinx

from hybridtensor import __version__

project = "hybridtensor"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = f"hybridtensor {version}"
html_copy_source = False

myst_heading_anchors = 3  # links to headings, by the names that they have on GitHub
autodoc_typehints_format = "short"
autodoc_mock_imports = ["accelerate", "lightning", "safetensors", "torchtitan", "transformer_engine", "transformers"]
autodoc_type_aliases = {name: name for name in ("Recipe", "RecipeName")}  # not their members, each time
napoleon_use_ivar = True  # attributes are fields of their class


def is_field(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which their classes' docstrings tell of."""
    return True if type(member).__name__ == "_tuplegetter" else None


def with_names(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any) -> Any:
    """Write aliases in unions as their names."""
    return signature and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature), returns


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", is_field)
    app.connect("autodoc-process-signature", with_names)
