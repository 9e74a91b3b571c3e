"""The `rekindle` command."""

import time

STARTED = time.perf_counter()  # when the user pressed Enter, but for Python's own start
