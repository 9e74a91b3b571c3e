"""Publishing KV for others, and serving it."""
