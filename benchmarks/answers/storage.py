"""How much KV of a user's questions is stored, by the size of the KV store. Nothing is computed: only looked up.

The store of our own way after the stream is given less and less room; what has to go is what its policy chooses.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.answers.ways import TOP_K
from rekindle.engine.base import Engine
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of what the store takes after the stream
MAX_QUESTIONS = 30


def measure(engine: Engine, folder: Path, questions: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each size of the store in this folder, the largest first. The store is smaller afterwards."""
    cache = folder / "cache"
    whole = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    rows = []
    for share in SHARES:
        limit = int(whole * share)
        with Session(
            engine,
            cache=str(cache),
            library=str(folder / "library"),
            memory_limit="0",
            disk_limit=limit,
            answers="off",
        ) as session:
            assert session.cache.store is not None
            session.cache.store.disk.room.prune(limit)
            known = [_known(session, question) for question in questions[:MAX_QUESTIONS]]
        rows.append({"share": share, "limit_bytes": limit, "known_share": statistics.fmean(known) if known else None})
    return rows


def _known(session: Session, question: str) -> float:
    """The share of a question's prompt that has KV."""
    request = session.prepare(question, top_k=TOP_K).request
    prompt = encode_prompt(session.engine, request)
    known = session.cache.look(request, prompt.tokens, prompt.prompt_layout)
    session.cache.forget(known)
    return known.matches.length / len(prompt.tokens)
