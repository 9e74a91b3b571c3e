"""KV for tests of the store; the bench uses the same."""

from rekindle.bench.synthetic import SHELF, SMALL, keep, load, make_kv

__all__ = ["SHELF", "SMALL", "keep", "load", "make_kv"]
