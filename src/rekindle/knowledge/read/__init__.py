"""Files to documents, one module a kind of file."""
