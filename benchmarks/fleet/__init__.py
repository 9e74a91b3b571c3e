"""`python -m benchmarks fleet`: vLLM processes that share a Redis and S3. It begins in `bench`."""
