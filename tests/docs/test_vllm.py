"""The guide, vllm.md: it needs vLLM, so tests/fleet runs it."""

PAGES = ["docs/guide/vllm.md"]
