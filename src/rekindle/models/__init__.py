"""Model files: finding, fetching, checking and digesting them. No torch."""
