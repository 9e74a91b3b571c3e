"""KV from an origin: found, verified, and fetched while the rest of the prompt is computed."""
