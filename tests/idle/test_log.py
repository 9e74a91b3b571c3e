"""The log of idle work: an action is credited with what came after it, until the next on the same answer."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from rekindle.idle.log import Action, IdleAction, recent_actions, record_action, summarize_actions
from rekindle.knowledge.library import Library
from tests.knowledge.conftest import library


def used(known: Library, times: int, seconds: float) -> None:
    with known.writing() as connection:
        connection.execute("UPDATE answers SET uses=uses+?, saved=saved+? WHERE id=1", (times, seconds))


def test_an_action_is_credited_only_with_what_came_after_it(tmp_path: Path) -> None:
    known = library(tmp_path)
    with known.writing() as connection:
        connection.execute(
            "INSERT INTO answers (id, question, terms, origin, top_k, retrieval, evidence, generation, state, made, "
            "used, size) VALUES (1, 'Who?', 't', 'user', 5, 'fused', x'', 1, 'fresh', 0, 0, 1)"
        )
    used(known, 5, 50.0)  # what users did before any idle work
    for name, times, seconds in (("refresh", 2, 8.0), ("restore", 1, 3.0), ("decode", 1, 4.0)):
        assert name in get_args(Action)
        record_action(known, IdleAction(name, "Who?", 1, 1.0))  # type: ignore[arg-type]
        used(known, times, seconds)
    record_action(known, IdleAction("warm", "the instructions", None, 1.0))
    credited = {way.action: (way.uses, way.saved_seconds) for way in summarize_actions(known)}
    assert credited == {"refresh": (3, 11.0), "restore": (0, 0.0), "decode": (1, 4.0), "warm": (0, 0.0)}
    last = [(entry.action, entry.uses, entry.saved_seconds) for entry in recent_actions(known, 10)]
    assert last == [("warm", None, None), ("decode", 1, 4.0), ("restore", None, None), ("refresh", 3, 11.0)]
    known.close()
