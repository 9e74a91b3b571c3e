"""Real clients, in an environment of their own, against `rekindle serve`: `make test-clients`."""
