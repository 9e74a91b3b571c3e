"""Questions that a user may ask next."""
