"""`python -m rekindle` is the `rekindle` command."""

from rekindle.cli import main

main()
