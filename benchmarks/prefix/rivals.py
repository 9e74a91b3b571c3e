"""What others do with the same prompts, as a bench runs it beside ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from benchmarks.prefix.floor import Floor, Run


class Rivals(ABC):
    """The rivals of an engine. Those that only reuse a prefix in memory have the rest from here."""

    titles: ClassVar[dict[str, str]]  # name in fields -> name for people

    @abstractmethod
    def prepare(self, number: int, prefix: list[int], floor: Floor) -> dict[str, Run]:
        """How each of them answers prompts that begin with `prefix`, whose KV is in the floor's sequence."""

    def cold(self) -> dict[str, Run]:
        """How each of them answers a prompt that it never saw, given whole."""
        return {}

    def reply(self, tokens: list[int], count: int) -> list[int] | None:  # noqa: ARG002
        """What one of them answers, greedily; None if it is the same model in the same program as ours."""
        return None

    def restart(self) -> dict[str, Any]:
        """What they need to go on in another process, where `Restarted` takes it up."""
        return {}

    def sizes(self) -> dict[str, float]:
        """Bytes a token that each of them has on disk."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free what they hold."""
