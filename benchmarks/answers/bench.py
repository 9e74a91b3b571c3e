"""`python -m benchmarks answers`: questions about one's own documents, answered before they are asked.

stream   per user: documents first, idle work, then questions in their order, with those that come back; between them
         questions are foreseen from the earlier ones, none by a model that is too small to ask. Every way of answering
         has caches of its own (see `ways`)
scheduler  idle work with and without the rule, in the three cases published (see `schedule`)
storage  how much KV is known by the room for it (see `storage`)
guard    which stored answers may be given for questions that come back or only look alike (see `guard`)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.answers import guard, schedule
from benchmarks.answers.report import AnswerResults, UserResults, add_rows, measure_storage
from benchmarks.answers.ways import DIRECT, NEW_TOKENS, TOP_K, VERIFIED, WAYS, Way, WayRun, people, stream
from benchmarks.base import Advance, BenchOptions, Report, Units, about, known, rotated, scratch
from benchmarks.models import load
from benchmarks.personal import Person, PersonalSet, personal_sets
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.idle.log import IdleAction
from rekindle.session.library import Knowledge
from rekindle.settings import Settings

SETS = ("qmsum", "locomo", "enron_qa")  # of a folder that has more, those with questions of one person
QUESTIONS, QUICK_QUESTIONS = 4, 1  # of each user, beside those that come back
QUICK_ASKED = 2  # with those
USERS = 1  # of each set
STRIDE = 3  # questions foreseen at a time
ABSTRACTS = 6  # documents that are summed up before the first question
WARM_PASSAGES, QUICK_WARM_PASSAGES = 160, 4
_LIMIT_BYTES = 40 << 30
_MAX_FORESEEN = 1000

Fields = dict[str, Any]


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything."""
    if options.engine != "hf":
        raise InvalidSetting("The published ways need the hf engine: leave --engine out.")
    sets = personal_sets(options.data)
    chosen = [some for some in sets if some.name in SETS] or sets
    advance("load the model")
    engine = load(options)
    fields = {"top_k": TOP_K, "new_tokens": NEW_TOKENS, "stride": STRIDE}
    units = Units("answers", options, about(engine, options) | fields, advance)
    first = chosen[:1] if options.quick else chosen
    users = people(first, options.users or USERS)
    try:
        measure = partial(_user, engine, options, advance=units.advance)
        each = [(f"{name}, user {person.name}", partial(measure, name, person)) for name, person in users]
        measured = known([units.one(name, UserResults, job) for name, job in each])
        schedule = partial(_schedule, engine, users[0][1], units.advance)
        scheduled = None if options.quick else units.one("scheduler", Fields, schedule)
    finally:
        engine.close()
    guarded = units.one("guard", Fields, partial(_guard, options, first, units.advance)) or {}
    report = units.report()
    if measured:
        add_rows(report, AnswerResults(measured, scheduled, guarded))
    else:
        report.fields |= {"scheduler": scheduled, "guard": guarded}
    return report


def _user(engine: Engine, options: BenchOptions, name: str, person: Person, advance: Advance) -> UserResults:
    with scratch() as folder:
        return _Person(engine, options, name, person, Path(folder), advance).measure()


def _schedule(engine: Engine, person: Person, advance: Advance) -> dict[str, Any]:
    with scratch() as folder:
        return schedule.measure(engine, person, Path(folder), advance)


@contextmanager
def _knowledge() -> Iterator[Knowledge]:
    """A library without a model."""
    with scratch() as folder:
        knowledge = Knowledge(Settings(library=folder, cache="off"), lambda *_, **__: None)
        try:
            yield knowledge
        finally:
            knowledge.close()


def _guard(options: BenchOptions, sets: list[PersonalSet], advance: Advance) -> Fields:
    """What the guard lets through."""
    threshold = Settings().similarity_threshold
    with _knowledge() as knowledge:
        found = guard.measure(sets, knowledge, threshold, advance)
        return found | guard.measure_pairs(options.pairs, knowledge.embedder(), threshold)


class _Person:
    """One user: documents, idle work, then the stream of questions in every way."""

    def __init__(
        self, engine: Engine, options: BenchOptions, name: str, person: Person, folder: Path, advance: Advance
    ) -> None:
        self._engine, self._options, self._person, self._folder = engine, options, person, folder
        self._name, self._advance = name, advance
        self._seen = 0  # the last foreseen question that the other runs know
        self._near: list[dict[str, float]] = []  # how near foreseen questions were to each that was asked

    def measure(self) -> UserResults:
        """All ways on the same questions, in turns."""
        asked = stream(self._person, self._options.rounds(QUESTIONS, QUICK_QUESTIONS))
        asked = asked[:QUICK_ASKED] if self._options.quick else asked
        runs, idle = self._begin()
        try:
            for number, question in enumerate(asked):
                self._near.append(self._nearest(runs, question.text))
                for run in rotated(runs, number):
                    self._advance(f"{self._name}: question {number + 1} of {len(asked)}, {run.way.name}")
                    run.ask(question.text)
                if question.kind == "first" and number + 1 < len(asked):
                    self._advance(f"{self._name}: foreseeing after question {number + 1}")
                    self._foresee(runs, idle)
        finally:
            for run in runs:
                run.close()
        questions = [question.text for question in self._person.questions]
        stored = measure_storage(self._engine, self._folder / VERIFIED, questions)
        results = {run.way.name: run.results for run in runs}
        idle_seconds = {run.way.name: run.idle_seconds for run in runs}
        return UserResults(self._name, self._person.name, asked, results, idle_seconds, stored, self._near)

    @staticmethod
    def _nearest(runs: list[WayRun], question: str) -> dict[str, float]:
        """The cosine of the nearest question that was foreseen from each source, before it is asked."""
        session = next(run for run in runs if run.way.name == VERIFIED).session
        vector = session.knowledge.embedder().embed([question]).vectors[0]
        nearest: dict[str, float] = {}
        for near in session.answers.bank().nearest(vector, _MAX_FORESEEN):
            if near.entry.asked is None:
                nearest[near.entry.origin] = max(near.similarity, nearest.get(near.entry.origin, 0.0))
        return nearest

    def _begin(self) -> tuple[list[WayRun], Idle]:
        """Ingest, do the first idle work once, and give every way its folders."""
        ways = {way.name: way for way in WAYS}
        first = WayRun.open(ways[VERIFIED], self._engine, self._folder / VERIFIED, _LIMIT_BYTES)
        self._advance(f"{self._name}: documents of {self._person.name}")
        first.session.ingest(documents=self._person.documents)
        first.session.flush()
        for way in WAYS:
            if way.name != VERIFIED:
                shutil.copytree(self._folder / VERIFIED / "library", self._folder / way.name / "library")
        idle = self._idle(first)
        self._advance(f"{self._name}: idle work before the first question")
        stride = 1 if self._options.quick else STRIDE
        done = [
            *idle.abstracts(1 if self._options.quick else ABSTRACTS),
            *idle.predict_from_abstracts(stride),
        ]
        first.session.flush()
        first.session.close()
        done += self._warm(ways[DIRECT])
        first = WayRun.open(ways[VERIFIED], self._engine, self._folder / VERIFIED, _LIMIT_BYTES)
        first.idle_seconds = sum(did.seconds for did in done)
        runs = [first]
        for way in WAYS:
            if way.name != VERIFIED:
                if way.ours:
                    shutil.copytree(self._folder / VERIFIED / "cache", self._folder / way.name / "cache")
                runs.append(WayRun.open(way, self._engine, self._folder / way.name, _LIMIT_BYTES))
                runs[-1].idle_seconds = first.idle_seconds if way.ours else 0.0
        if hasattr(os, "sync"):
            os.sync()  # gigabytes were copied: nobody shall wait for the disk because of that
        self._spread(runs)
        return sorted(runs, key=lambda run: [way.name for way in WAYS].index(run.way.name)), self._idle(first)

    def _warm(self, way: Way) -> list[IdleAction]:
        """Compute passages ahead. What is only read is exact; a way that reuses chunks also notes where they are."""
        run = WayRun.open(way, self._engine, self._folder / VERIFIED, _LIMIT_BYTES)
        done = self._idle(run).warm()
        run.session.flush()
        run.close()
        return done

    def _idle(self, run: WayRun) -> Idle:
        max_count = QUICK_WARM_PASSAGES if self._options.quick else WARM_PASSAGES
        options = IdleOptions(
            stride=STRIDE, settle_seconds=0.0, warm_passages=max_count, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS
        )
        return Idle(run.session, options)

    def _foresee(self, runs: list[WayRun], idle: Idle) -> None:
        own = next(run for run in runs if run.way.name == VERIFIED)
        done = idle.predict_from_history(1 if self._options.quick else STRIDE)
        own.idle_seconds += sum(did.seconds for did in done)
        own.session.flush()
        self._spread(runs)

    def _spread(self, runs: list[WayRun]) -> None:
        """Let the other ways that foresee know what was foreseen; the questions are the same for all."""
        own = next(run for run in runs if run.way.name == VERIFIED)
        new = own.session.answers.bank().entries(where=f"origin!='user' AND id>{self._seen} ORDER BY id")
        self._seen = max([self._seen, *(entry.id for entry in new)])
        for run in runs:
            if run is not own and run.way.foresees:
                run.learn(new)
