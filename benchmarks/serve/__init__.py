"""`python -m benchmarks serve`: first tokens and throughput that clients of a server see. It begins in `bench`."""
