"""Stored answers: when they may be served, and when they may not any more."""
