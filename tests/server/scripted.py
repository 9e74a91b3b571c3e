"""A model whose replies are written beforehand, with a context long enough for agents.

Computing a token takes a little time, as with any model. Were it free, loading KV would be slower than computing it:
nothing would be loaded after a restart, where costs are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Span
from rekindle.core.request import Sampling
from rekindle.engine.base import Logits, TokenSampler
from rekindle.engine.fake import END, VOCABULARY, FakeEngine, FakeSequence
from rekindle.engine.row_checks import CheckedRow


class ScriptedEngine(FakeEngine):
    """Says the next of `replies` to each prompt, and the last one again once there are no more.

    What `answers` gives for the text of a prompt goes first.
    """

    prefill_tokens = 4096
    token_seconds = 1e-5

    def __init__(
        self,
        replies: Sequence[str],
        answers: Callable[[str], str | None] = lambda _: None,
        *,
        seed: int = 0,
        context_tokens: int = 200_000,
    ) -> None:
        super().__init__(seed=seed, context_tokens=context_tokens)
        self.replies = list(replies)
        self.answers = answers
        self.prompts: list[str] = []
        self.computed = 0  # tokens

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:  # type: ignore[override]
        self.prompts.append(self.tokenizer.decode(context))
        reply = self.answers(self.prompts[-1])
        if reply is None:
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return Reciting([*self.tokenizer.encode(reply), END])

    def _run(self, row: CheckedRow, cancelled: Callable[[], bool] | None) -> Logits:
        sequence = row.row.sequence
        assert isinstance(sequence, FakeSequence)
        self.computed += len(row.tokens)
        time.sleep(self.token_seconds * len(row.tokens))
        for layer in range(len(self.layout.layers)):
            for feed in row.row.feeds:
                if layer in feed.layers:
                    feed.fill(layer, sequence.buffer(layer, feed.span))
            own = sequence.buffer(layer, Span(0, sequence.capacity))
            own.keys[:, row.positions] = own.values[:, row.positions] = np.float32(row.tokens)[:, None] + layer
        return np.zeros((0 if row.row.logits == "none" else 1, VOCABULARY), dtype=np.float32)


def fill_in_engine(*replies: str) -> ScriptedEngine:
    """A model that can fill in the middle: its markers are the bytes 1, 2 and 3."""
    engine = ScriptedEngine(replies)
    markers = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
    engine.tokenizer.token_of = markers.get  # type: ignore[method-assign]
    return engine


class Reciting:
    """Draws the tokens of a text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens)

    def draw(self, logits: NDArray[np.float32]) -> int:
        return self._left.pop(0)
