"""Values that the layers exchange: no I/O, no torch."""
