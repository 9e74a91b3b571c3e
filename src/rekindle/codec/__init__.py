"""KV to bytes and back. No I/O."""
