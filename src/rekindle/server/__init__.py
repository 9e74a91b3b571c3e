"""An OpenAI-compatible server in front of a session."""
