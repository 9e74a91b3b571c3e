"""KV of passages reused anywhere in a prompt, with selective recompute."""
