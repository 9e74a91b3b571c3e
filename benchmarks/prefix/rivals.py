"""What others do with the same prompts, as a bench runs it beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.prefix.floor import Floor, Run
from rekindle.engine.base import Engine


class Rivals(Protocol):
    """The rivals of an engine."""

    titles: dict[str, str]  # name in fields -> name for people

    def prepare(self, number: int, prefix: list[int], floor: Floor) -> dict[str, Run]:
        """How each of them answers prompts that begin with `prefix`, whose KV is in the floor's sequence."""

    def cold(self) -> dict[str, Run]:
        """How each of them answers a prompt that it never saw, given whole."""

    def reply(self, tokens: list[int], count: int) -> list[int] | None:
        """What one of them answers, greedily; None if it is the same model in the same program as ours."""

    def restart(self) -> dict[str, Any]:
        """What they need to go on in another process, where `restarted` takes it up."""

    def sizes(self) -> dict[str, float]:
        """Bytes a token that each of them has on disk."""

    def close(self) -> None:
        """Free what they hold."""


def rivals_of(engine: Engine, folder: Path) -> Rivals:
    """Those that drive the same kind of model. They may write into `folder`."""
    from rekindle.engine.load import kind_of

    if kind_of(engine) == "llamacpp":
        from benchmarks.prefix.llama_rivals import LlamaRivals

        return LlamaRivals(engine, folder)
    from benchmarks.prefix.hf_rivals import HfRivals

    return HfRivals(engine)


def restarted(engine: Engine, task: dict[str, Any]) -> Callable[[int], dict[str, Run]]:
    """The rivals in a fresh process: how they answer prompts of prefix number so and so."""
    if not task:
        return lambda _: {}
    from benchmarks.prefix.llama_rivals import Restarted

    return Restarted(engine, task).prepare
