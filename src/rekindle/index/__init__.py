"""Tokens to places of KV. No I/O of its own."""
