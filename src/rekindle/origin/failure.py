"""What goes wrong with an origin, as one error."""

from __future__ import annotations

from rekindle.errors import RekindleError


class OriginFailed(RekindleError):
    """An origin does not answer, answers something else, or what it gives is not what was published: compute."""
