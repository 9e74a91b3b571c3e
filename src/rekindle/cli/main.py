"""All commands of `rekindle`. One module per group of commands; heavy imports happen inside them."""

from rekindle.cli import (  # noqa: F401  (each module adds its commands to `app`)
    answers,
    apps,
    ask,
    bench,
    cache,
    chat,
    doctor,
    idle,
    knowledge,
    models,
    origin,
    server,
    top,
)
from rekindle.cli.options import app

__all__ = ["app"]
