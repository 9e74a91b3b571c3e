"""What a model needs where answers may be nearly the same, measured: `rekindle calibrate`."""
