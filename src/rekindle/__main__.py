"""`python -m rekindle` is the `rekindle` command."""

from rekindle.cli.main import main

main()
