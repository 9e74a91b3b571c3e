"""Removing every trace of tokens and texts."""
