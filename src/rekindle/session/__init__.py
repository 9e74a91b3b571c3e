"""A loaded model and the life of a request."""
