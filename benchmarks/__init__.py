"""Benchmarks, shipped: the same command for people and for CI. They may import the rivals they measure against."""
