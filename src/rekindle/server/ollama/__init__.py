"""Ollama's API: /api/."""
