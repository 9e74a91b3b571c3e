"""Deciding what to reuse: what was found, what it costs, and the plan that follows. Nothing here does the work."""
