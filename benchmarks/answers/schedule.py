"""What the scheduler of idle work is worth: the three cases that were published with it (section 5.5 of the source).

raised   the similarity threshold rises to the cut-off: foreseen questions are only read from then on
fallen   it falls again: those that were only read are answered
room     the KV store may grow: the KV of known questions that had to go is computed again

Each case is one user's questions, with idle work after each, in several ways: always (every foreseen question is read
and answered, nothing is converted), percache (the published rule), rekindle (ours: of what is only read, as many
passages as pay). All of it is done by the real model; seconds and computed tokens of idle work are counted.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answers.ways import NEW_TOKENS, PUBLISHED_SIMILARITY, TOP_K, change_banks, take_cut
from benchmarks.base import Advance
from benchmarks.personal import Person
from rekindle.engine.base import Engine
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.idle.log import IdleAction
from rekindle.idle.prepare import Rule
from rekindle.session.session import Session

CUT_OFF = 0.9
QUESTIONS = 6
CHANGED_AFTER = 2  # questions; as published for the first case
STRIDE = 2  # questions foreseen after each
_NEVER = 1.0  # a cut-off that no threshold reaches
_ROOM_TOKENS, _MORE_ROOM_TOKENS = 1_600, 40_000  # of the KV store before and after it may grow
ALWAYS, PUBLISHED, OURS = "always", "percache", "rekindle"


@dataclass(frozen=True)
class _Phase:
    """What holds from some question on."""

    threshold: float
    room_tokens: int = _MORE_ROOM_TOKENS


@dataclass(frozen=True)
class ChangeCase:
    """One change between questions, and the ways that are compared."""

    name: str
    before: _Phase
    after: _Phase
    ways: tuple[str, ...]


CASES = (
    ChangeCase("raised", _Phase(PUBLISHED_SIMILARITY), _Phase(CUT_OFF), (ALWAYS, PUBLISHED, OURS)),
    ChangeCase("fallen", _Phase(CUT_OFF), _Phase(PUBLISHED_SIMILARITY), (ALWAYS, OURS)),
    ChangeCase("room", _Phase(PUBLISHED_SIMILARITY, _ROOM_TOKENS), _Phase(PUBLISHED_SIMILARITY), (ALWAYS, OURS)),
)


@dataclass
class _WayResult:
    """A way through a case: of each question its time, KV that was known and whether an answer was given; idle work."""

    seconds: list[float] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    idle_seconds: list[float] = field(default_factory=list)  # of all idle work so far
    idle_tokens: list[int] = field(default_factory=list)  # computed by all idle work so far
    actions: list[str] = field(default_factory=list)

    def work(self, done: Sequence[IdleAction], *, more: bool = False) -> None:
        """Note idle work that was done after a question; `more`: after the same as before."""
        seconds = sum([*self.idle_seconds[-1:], *(did.seconds for did in done)])
        tokens = sum([*self.idle_tokens[-1:], *(did.tokens for did in done)])
        place = len(self.idle_seconds) - more
        self.idle_seconds[place:], self.idle_tokens[place:] = [seconds], [tokens]
        self.actions += [did.action for did in done]


def measure(engine: Engine, person: Person, folder: Path, advance: Advance) -> dict[str, Any]:
    """All cases for one user, each in all its ways."""
    asked = [question.text for question in person.questions[:QUESTIONS]]
    library = folder / "library"
    with Session(engine, cache="off", library=str(library)) as session:
        session.ingest(documents=person.documents)
        session.flush()
    return {case.name: _case(case, engine, asked, library, folder / case.name, advance) for case in CASES}


def _case(
    case: ChangeCase, engine: Engine, asked: Sequence[str], library: Path, folder: Path, advance: Advance
) -> dict[str, Any]:
    rows = {}
    for way in case.ways:
        shutil.copytree(library, folder / way / "library")
        advance(f"scheduler, {case.name}: {way}")
        rows[way] = _row(_through(case, way, engine, asked, folder / way), _changed_after(asked))
    always, ours = rows[ALWAYS], rows[OURS]
    return {
        "questions": len(asked),
        "changed_after": _changed_after(asked),
        "ways": rows,
        "saved_share": 1.0 - ours["idle_seconds"][-1] / always["idle_seconds"][-1] if always["actions"] else None,
        "latency_ratio": ours["mean_latency_s"] / always["mean_latency_s"],
        "later_latency_ratio": ours["later_latency_s"] / always["later_latency_s"],
    }


def _changed_after(asked: Sequence[str]) -> int:
    return min(CHANGED_AFTER, max(1, len(asked) - 1))


def _through(case: ChangeCase, way: str, engine: Engine, asked: Sequence[str], folder: Path) -> _WayResult:
    result, change = _WayResult(), _changed_after(asked)
    for stage, questions in ((case.before, asked[:change]), (case.after, asked[change:])):
        with _open(engine, folder, stage) as session:
            idle = _idle(session, way)
            if stage is case.after and way != ALWAYS:
                result.work(idle.convert(), more=True)
            for question in questions:
                _ask(session, question, result)
                result.work(idle.predict_from_history(STRIDE))
                session.flush()
    return result


def _open(engine: Engine, folder: Path, stage: _Phase) -> Session:
    session = Session(
        engine,
        cache=str(folder / "cache"),
        library=str(folder / "library"),
        memory_limit="0",
        disk_limit=stage.room_tokens * engine.layout.token_bytes,
        answers="direct",
        similarity_threshold=stage.threshold,
    )
    change_banks(session, take_cut)
    return session


def _idle(session: Session, way: str) -> Idle:
    rule: Rule = "percache" if way == PUBLISHED else "rekindle"
    options = IdleOptions(
        stride=STRIDE,
        max_tokens=NEW_TOKENS,
        min_tokens=NEW_TOKENS,
        top_k=TOP_K,
        cutoff=_NEVER if way == ALWAYS else CUT_OFF,
        rule=rule,
    )
    return Idle(session, options)


def _ask(session: Session, question: str, result: _WayResult) -> None:
    started = time.perf_counter()
    answer = session.ask(question, top_k=TOP_K, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    result.seconds.append(time.perf_counter() - started)
    result.known.append(answer.usage.cached_tokens)
    result.given.append(answer.stored is not None and answer.stored.way == "direct")
    session.flush()


def _row(result: _WayResult, change: int) -> dict[str, Any]:
    return {
        "seconds": result.seconds,
        "known_tokens": result.known,
        "answers_given": sum(result.given),
        "idle_seconds": result.idle_seconds,
        "idle_tokens": result.idle_tokens,
        "mean_latency_s": statistics.fmean(result.seconds),
        "later_latency_s": statistics.fmean(result.seconds[change:]),
        "later_known_tokens": statistics.fmean(result.known[change:]),
        "actions": {action: result.actions.count(action) for action in dict.fromkeys(result.actions)},
    }
