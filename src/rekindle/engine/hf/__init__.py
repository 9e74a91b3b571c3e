"""The Hugging Face engine: any decoder of transformers."""
