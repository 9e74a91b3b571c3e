"""KV for tests of the store; the bench uses the same."""

from benchmarks.synthetic import SHELF, SMALL, keep, load, make_kv

__all__ = ["SHELF", "SMALL", "keep", "load", "make_kv"]
