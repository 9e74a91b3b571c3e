"""Running requests: prompt, prefill, decode, and the session that holds them together."""
