"""Caches of what is worked out once."""

from hybridtensor.ops.cache import Cache


def test_a_full_cache_is_emptied():
    cache = Cache(most=2)
    for key in "aab":
        cache[key] = key
    assert cache == {"a": "a", "b": "b"}
    cache["c"] = "c"
    assert cache == {"c": "c"}
