"""What works and is tested, but no session reaches yet: see "Waiting to be connected" in the README beside this."""
