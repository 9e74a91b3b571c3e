"""`python -m benchmarks sparse`: block-sparse prefill against dense. It begins in `bench`."""
