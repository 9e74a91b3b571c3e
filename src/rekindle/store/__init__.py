"""KV on disk and in memory, within limits, shared by processes."""
