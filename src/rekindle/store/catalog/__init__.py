"""The SQLite catalog: what is in a cache folder."""
