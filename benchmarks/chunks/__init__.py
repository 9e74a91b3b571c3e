"""`python -m benchmarks chunks`: passages that stand anywhere in any prompt. It begins in `bench`."""
