"""Sessions that work ahead: an engine that says what it is told to, and an embedder that knows words."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle import Session
from rekindle.core.request import Sampling
from rekindle.engine.base import TokenSampler
from rekindle.engine.embedding.embedder import Embedder, Embeddings
from rekindle.engine.fake import FakeEngine
from rekindle.idle import abstracts, idle, prepare
from rekindle.idle.generated_questions import judging_message, merging_prompt, prompt_from_history, summary_prompt
from rekindle.idle.idle import Idle
from rekindle.idle.log import IdleAction
from rekindle.models.pull import pull
from tests.session.asking import Terse

DOCUMENTS = {
    "lamp": "Mara keeps the lighthouse of Ternholm. The lamp burns oil from the harbour of Vesk.",
    "ferry": "The ferry to Ormund leaves on Tuesdays. A ticket costs eleven crowns at the pier.",
    "bread": "Tomas bakes rye bread before dawn. His oven stands behind the old brewery.",
}
# How the prompts of idle work can be told from others.
SUMMING = summary_prompt(["text"])[-1].content.split("\n")[-1]
MERGING = merging_prompt(["text"])[-1].content.split("\n")[-1]
JUDGING = judging_message("x").split("\n")[-1]
GENERAL, DETAILED = "some general ones", "detailed ones"
FROM_HISTORY = prompt_from_history(["text"], 2)[-1].content.split("\n")[-1].removeprefix("Write 2 ")
ABOUT_DOCUMENTS = "1. Where does the lamp burn oil?\n2. When does the ferry to Ormund leave?"
ABOUT_QUESTIONS = "1. What does a ticket to Ormund cost?\n2. Does Tomas like the zebras of Paris?"
SAID = {
    SUMMING: "A short note.",
    MERGING: "All of it is about a harbour town.",
    JUDGING: "yes",
    GENERAL: ABOUT_DOCUMENTS,
    DETAILED: ABOUT_DOCUMENTS,
    FROM_HISTORY: ABOUT_QUESTIONS,
}


class Scripted(FakeEngine):
    """Says what it is told to where a prompt has some words in it, of several texts the next; else whatever it thinks.

    It counts as large enough to ask questions.
    """

    def __init__(self, said: Mapping[str, str | list[str]] = SAID, seed: int = 0) -> None:
        super().__init__(seed=seed, context_tokens=4000)
        self.parameters = 10**9
        self.said = dict(said)
        self.asked: list[str] = []  # the prompts that were answered in such a way

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:  # type: ignore[override]
        prompt = self.tokenizer.decode(context)
        for words, text in self.said.items():
            if words in prompt:
                self.asked.append(prompt)
                now = text if isinstance(text, str) else text.pop(0) if text else "Nothing."
                return _Saying([*self.tokenizer.encode(now), *self.tokenizer.stop_ids])
        return super().sampler(sampling, context)


class TerseScripted(Scripted, Terse):
    """Ends what it thinks as soon as it may."""


class _Saying:
    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens)

    def draw(self, logits: NDArray[np.float32]) -> int:
        return self._left.pop(0)


class Words(Embedder):
    """Texts with many words in common are near to each other."""

    def __init__(self, inner: Embedder) -> None:
        self.__dict__.update(inner.__dict__)
        self.dimensions = 64

    def embed(self, texts: Sequence[str], **more: Any) -> Embeddings:
        vectors = np.full((len(texts), self.dimensions), 1e-3, np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                vectors[row, zlib.crc32(word.encode()) % self.dimensions] += 1.0
        return Embeddings(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), len(texts), 0)


@pytest.fixture
def free_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine say what it is told to, whatever a real model is held to."""
    monkeypatch.setattr(idle, "list_grammar", lambda *_: None)
    monkeypatch.setattr(abstracts, "summary_grammar", lambda: None)
    monkeypatch.setattr(prepare, "yes_no_grammar", lambda: None)


def session(folder: Path, embedder: str, engine: FakeEngine | None = None, **settings: Any) -> Session:
    """A session with the three documents."""
    given = {"cache": folder / "cache", "embedder": embedder, "answers": "verified", **settings}
    made = Session(engine or Scripted(), **given)
    made.knowledge._embedder = Words(Embedder.load(pull(embedder).files))
    made.ingest(documents=[{"text": text, "source": name, "title": name} for name, text in DOCUMENTS.items()])
    return made


def predicted(idle: Idle, max_count: int) -> list[IdleAction]:
    """What was prepared of the questions that abstracts bring; the other actions are left out."""
    idle.abstracts()
    return [did for did in idle.predict_from_abstracts(max_count) if did.action in ("answer", "prefill")]
