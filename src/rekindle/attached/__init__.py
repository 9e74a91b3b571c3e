"""A transformers model in somebody else's loop: `rekindle.attach`."""
