"""The page at /: files for browsers, and what they show."""
