"""Rekindle inside other people's code: transformers loops, LangChain, LlamaIndex."""
