"""`python -m benchmarks prefix`: first tokens of prompts whose beginning is known. It begins in `bench`."""
