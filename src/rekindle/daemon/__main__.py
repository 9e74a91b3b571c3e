"""`python -m rekindle.daemon` is started by the commands, in the background."""

from rekindle.daemon.process import main

main()
