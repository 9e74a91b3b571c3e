"""`python -m benchmarks stream`: a context that an origin has, computed, streamed or both. It begins in `bench`."""
