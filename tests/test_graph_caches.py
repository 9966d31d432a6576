"""Compiled graphs on disk: torch's caches tell versions of the package apart."""

from pathlib import Path

import torch
from torch._inductor.codecache import FxGraphHashDetails

import hybridtensor
from hybridtensor.graph_caches import digest_of, tell_caches


def test_the_tag_of_caches_has_version_and_sources():
    own = f"hybridtensor {hybridtensor.__version__} {digest_of(Path(hybridtensor.__file__).parent)}"
    assert own in torch.compiler.config.cache_key_tag
    with torch.compiler.config.patch(cache_key_tag="of the user"):
        tell_caches()
        tell_caches()
        assert torch.compiler.config.cache_key_tag == f"of the user {own}"
    assert torch.compiler.config.cache_key_tag.count(own) == 1


def test_a_changed_source_has_another_digest(tmp_path):
    (tmp_path / "inner").mkdir()
    source = tmp_path / "inner" / "a.py"
    source.write_text("x = 1\n")
    before = digest_of(tmp_path)
    assert before == digest_of(tmp_path)
    source.write_text("x = 2\n")
    assert digest_of(tmp_path) != before


def test_torch_asks_the_tag():
    """Private in torch, and what the keys of both caches are made of."""
    assert "cache_key_tag" in FxGraphHashDetails.__init__.__code__.co_names
