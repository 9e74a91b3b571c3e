"""`python -m benchmarks answers`: questions answered before they are asked. It begins in `bench`."""
