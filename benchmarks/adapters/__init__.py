"""`python -m benchmarks adapters`: several adapters that work on the same texts. It begins in `bench`."""
