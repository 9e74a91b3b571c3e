"""`python -m rekindle` is the `rekindle` command."""

from rekindle.cli.entry import main

main()
