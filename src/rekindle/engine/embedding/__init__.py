"""Sentence embeddings in numpy: no torch."""
