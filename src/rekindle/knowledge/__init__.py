"""Documents: read, split into passages, kept, and found again."""
