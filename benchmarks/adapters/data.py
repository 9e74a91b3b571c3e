"""What `python -m benchmarks adapters` is fed with: adapters, conversations, documents, and how apps are used.

A data folder, or the folders in it, may hold `.jsonl` files whose records have `turns` (a conversation) or `document`
(something that is written or read), and `.csv` files of app usage with the columns timestamp, app and event. What it
does not hold comes from the sample that the package ships, or is made up by a rule.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import read_jsonl, texts
from benchmarks.personal import personal_sets
from rekindle.apps import state_of
from rekindle.core.scope import AppState
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.models.adapter_registry import RegisteredAdapter, check_name, entries
from rekindle.session.calibrate.calibration import adapter_folders

# Parts of names: screens of the system ask nothing, and what recorded a usage (loggers, surveys of Paco) is no use.
_NO_APPS = ("launcher", "quickstep", "system", "settings", "installer", "setupwizard", "logger", "paco")
_EVENTS: Mapping[str, AppState] = {"gone": "killed"}  # beside the names of systems
_MAX_TEXTS = 64  # of each kind that are put into tokens
_COLUMNS = {"timestamp", "app", "event"}
_SAMPLE_APPS, _SAMPLE_EVENTS, _SAMPLE_ENDS = 12, 400, 0.2
_TURNS_TOGETHER = 6  # of a conversation that is made of questions and answers


@dataclass(frozen=True)
class Event:
    """An app comes into a state."""

    seconds: float
    app: str
    state: AppState


@dataclass(frozen=True)
class AppUsage:
    """What one person did with apps, in order."""

    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Material:
    """Everything. `reasons` tells what did not come from the data folder."""

    conversations: tuple[str, ...]
    documents: tuple[str, ...]
    usages: tuple[AppUsage, ...]
    reasons: tuple[str, ...] = ()


def encoded(engine: Engine, texts: Sequence[str], random: np.random.Generator) -> list[list[int]]:
    """Some of the texts, drawn, as tokens."""
    some = [texts[place] for place in random.permutation(len(texts))[:_MAX_TEXTS]]
    return [engine.tokenizer.encode(f"{text}\n\n") for text in some]


def read_adapters(folder: Path | None) -> list[RegisteredAdapter]:
    """The adapters of a folder of folders, by name; without one, those that come with the package.

    Raises `InvalidSetting` if there are none.
    """
    if folder is None:
        return [entry for entry in entries() if entry.packaged]
    return [RegisteredAdapter(check_name(path.name), str(path)) for path in adapter_folders(folder)]


def read_material(folder: Path | None, seed: int) -> Material:
    """Everything that the folder holds, and the sample for the rest. Raises `InvalidSetting` if it cannot be read."""
    if folder is not None and not folder.is_dir():
        raise InvalidSetting(f"--data {folder} is not a folder. Give one with .jsonl texts and .csv usage.")
    reasons = []
    conversations, documents = _texts(folder)
    if not conversations and not documents:
        if folder is not None:
            raise InvalidSetting(f"--data {folder} has no .jsonl records with turns or document.")
        conversations, documents = _sample_conversations(), texts(None)[0].split("\n\n")
        reasons.append("texts: the sample of the package")
    usages = _usages(folder)
    if not usages:
        usages = [made_up_usage(seed)]
        reasons.append("usage: made up by a rule")
    return Material(tuple(conversations), tuple(documents), tuple(usages), tuple(reasons))


def made_up_usage(seed: int) -> AppUsage:
    """A usage by a simple rule: an app comes up, the one before steps back, and now and then one is closed."""
    random = np.random.default_rng(seed)
    events: list[Event] = []
    weights = 1 / np.arange(1, _SAMPLE_APPS + 1)
    before: str | None = None
    open_apps: list[str] = []
    for minute in range(_SAMPLE_EVENTS):
        app = f"app-{int(random.choice(_SAMPLE_APPS, p=weights / weights.sum())) + 1}"
        if before is not None and before != app:
            events.append(Event(60.0 * minute, before, "background"))
        events.append(Event(60.0 * minute, app, "foreground"))
        open_apps = [*(other for other in open_apps if other != app), app]
        if len(open_apps) > 1 and random.random() < _SAMPLE_ENDS:
            events.append(Event(60.0 * minute + 30.0, open_apps.pop(0), "killed"))
        before = app
    return AppUsage("made up", tuple(events))


def _texts(folder: Path | None) -> tuple[list[str], list[str]]:
    conversations: list[str] = []
    documents: list[str] = []
    for path in _paths(folder, "jsonl"):
        for record in read_jsonl(path):
            if not isinstance(record, Mapping):
                break
            if isinstance(record.get("turns"), list):
                conversations.append(_spoken(record["turns"]))
            elif isinstance(record.get("document"), str):
                documents.append(record["document"])
            else:
                break  # a file of something else
    return [text for text in conversations if text], [text for text in documents if text]


def _usages(folder: Path | None) -> list[AppUsage]:
    found = [AppUsage(path.stem, tuple(_events(path))) for path in _paths(folder, "csv")]
    return [usage for usage in found if any(event.state == "foreground" for event in usage.events)]


def _paths(folder: Path | None, suffix: str) -> list[Path]:
    return [] if folder is None else [*sorted(folder.glob(f"*.{suffix}")), *sorted(folder.glob(f"*/*.{suffix}"))]


def _spoken(turns: Sequence[Any]) -> str:
    said = [(str(turn.get("role", "")), str(turn.get("content", ""))) for turn in turns if isinstance(turn, Mapping)]
    return "\n".join(f"{role.capitalize()}: {content}" for role, content in said)


def _events(path: Path) -> Iterator[Event]:
    """Events of apps that a person uses; what is no state of an app (a screen that goes off) is passed over."""
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines)
        if not set(table.fieldnames or ()) >= _COLUMNS:
            return  # a table of something else
        for row in table:
            state, app = _state(row["event"]), row["app"]
            if state is not None and app and not any(part in app.lower() for part in _NO_APPS):
                try:
                    yield Event(float(row["timestamp"]), app, state)
                except ValueError as error:
                    raise InvalidSetting(f"{path}, line {table.line_num} has no time ({error}).") from error


def _state(event: str) -> AppState | None:
    if event in _EVENTS:
        return _EVENTS[event]
    try:
        return state_of(event)
    except InvalidSetting:
        return None


def _sample_conversations() -> list[str]:
    """Questions and answers about the sample documents, some of one person together."""
    found = []
    for person in personal_sets(None)[0].people:
        asked = [(question.text, question.answer) for question in person.questions if question.answer]
        for start in range(0, len(asked), _TURNS_TOGETHER):
            some = asked[start : start + _TURNS_TOGETHER]
            found.append("\n".join(f"User: {question}\nAssistant: {answer}" for question, answer in some))
    return found
