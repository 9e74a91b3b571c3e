"""Text and tokens: chat templates, tokenizers, constraints, tool calls."""
