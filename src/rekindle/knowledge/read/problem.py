"""What could not be read, and why."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.errors import ExtraMissing


@dataclass(frozen=True, slots=True)
class Problem:
    """A part of a file that could not be read, while the rest could.

    source  the record, mail or file it stands for, named as a `Document` is
    reason  a whole sentence for people, which names the source
    """

    source: str
    reason: str


def sentence(source: str, told: object) -> str:
    """What a reader told of a source, a clause that begins with its verb, as a whole sentence."""
    return f"{source} {str(told).rstrip('.')}."


def missing(what: str) -> ExtraMissing:
    """The error to raise where the parser of `what` is not installed."""
    return ExtraMissing(f'Reading {what} needs parsers that are not installed: pip install "rekindle[knowledge]"')
