"""KV for tests of the store; the bench uses the same."""

from benchmarks.synthetic import KV_SPACE, SMALL, keep, load, make_kv

__all__ = ["KV_SPACE", "SMALL", "keep", "load", "make_kv"]
