THOROUGH = True  # left out of `make quick`, not even imported
