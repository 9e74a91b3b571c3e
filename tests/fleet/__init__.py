"""Rekindle behind vLLM. `make test-fleet` runs these, in an environment of their own: vLLM pins torch."""
