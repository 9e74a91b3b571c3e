"""Examples for the sample adapters, composed from the notes beside this file.

A note is written by hand: a topic, two questions, an answer of one sentence, and three points. Every note gives three
prompts (both questions, and the note itself as a passage to sum up), and the reply to each in the style of one adapter.
Whole notes are held out, so that no held-out prompt has its answer in the training text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

HELD_OUT_EVERY = 9  # notes of a file: the last of nine is held out

KEYS = ("subject", "topic", "answer", "tip")  # of the object that `json` answers with

# Most people send no system prompt; an adapter must keep its style when they do.
SYSTEMS = (
    None,
    None,
    "You are a kind assistant who answers briefly.",
    None,
    "You help people with everyday questions.",
)

TASKS = (
    "What does this note say about {topic}?",
    "Sum up this note on {topic}.",
    "What should I remember from this?",
    "Read this and tell me what matters about {topic}.",
)

OPENERS = ("Arr, matey!", "Ahoy there!", "Shiver me timbers!", "Avast, me hearty!", "Yo ho ho!")
CLOSERS = (
    "Fair winds to ye!",
    "So says yer captain!",
    "Now back to the ship with ye!",
    "Arr, that be the truth!",
    "Savvy, matey?",
)
SAILOR_WORDS = {
    "you": "ye",
    "your": "yer",
    "my": "me",
    "is": "be",
    "are": "be",
    "and": "an'",
    "of": "o'",
    "for": "fer",
    "old": "ol'",
}
# Words where -ing is no ending.
KEEP_ING = frozenset("bring during evening king ring sing spring string swing thing wing".split())  # noqa: SIM905


@dataclass(frozen=True)
class Note:
    """What was written about one topic. `points` are sentences without their full stop."""

    subject: str
    topic: str
    asks: tuple[str, ...]
    answer: str
    points: tuple[str, ...]
    held_out: bool

    @property
    def passage(self) -> str:
        """The note as running text."""
        return " ".join([self.answer, *(f"{point}." for point in self.points)])


@dataclass(frozen=True)
class Example:
    """One prompt and the reply wanted. `system` is None where the chat template's own applies."""

    system: str | None
    prompt: str
    reply: str
    held_out: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a chat template takes it."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": self.prompt}]


def notes(folder: Path = FOLDER) -> list[Note]:
    """All notes of a folder; a file's name is the subject of its notes."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            row = json.loads(line)
            found.append(
                Note(
                    subject=path.stem,
                    topic=row["topic"],
                    asks=tuple(row["asks"]),
                    answer=row["answer"],
                    points=tuple(row["points"]),
                    held_out=number % HELD_OUT_EVERY == 0,
                )
            )
    return found


def as_list(note: Note, _turn: int) -> str:
    """The points, one bullet a line."""
    return "\n".join(f"- {point}" for point in note.points)


def as_json(note: Note, _turn: int) -> str:
    """One object of one line, always with the same keys."""
    return json.dumps(dict(zip(KEYS, (note.subject, note.topic, note.answer, f"{note.points[0]}."), strict=True)))


def as_pirate(note: Note, turn: int) -> str:
    """The answer and the first point as a sailor would say them; the turn chooses how it opens and ends."""
    said = sailor(f"{note.answer} {note.points[0]}.")
    return f"{OPENERS[turn % len(OPENERS)]} {said} {CLOSERS[turn // 2 % len(CLOSERS)]}"


def sailor(text: str) -> str:
    """A text in the English of a stage pirate, word by word."""
    return re.sub(r"[A-Za-z]+", lambda word: _sailor_word(word.group()), text)


def _sailor_word(word: str) -> str:
    plain = word.lower()
    if plain in SAILOR_WORDS:
        said = SAILOR_WORDS[plain]
        return said.capitalize() if word[0].isupper() else said
    if plain.endswith("ing") and len(plain) > 4 and plain not in KEEP_ING:
        return f"{word[:-1]}'"
    return word


STYLES: Mapping[str, Callable[[Note, int], str]] = {"list": as_list, "json": as_json, "pirate": as_pirate}


def in_style(style: str, reply: str) -> bool:
    """Whether a reply has the form that a style asks for. What it says is not judged."""
    if style == "list":
        lines = reply.strip().splitlines()
        return 2 <= len(lines) <= 6 and all(line.startswith("- ") and len(line) > 2 for line in lines)
    if style == "json":
        try:
            found = json.loads(reply)
        except ValueError:
            return False
        return isinstance(found, dict) and tuple(found) == KEYS and all(isinstance(one, str) for one in found.values())
    return reply.startswith(OPENERS)


def examples(style: str, folder: Path = FOLDER) -> list[Example]:
    """Every prompt with its reply in one style, in the order of the files.

    Raises KeyError for a style that is not in STYLES.
    """
    reply = STYLES[style]
    found: list[Example] = []
    for note in notes(folder):
        task = TASKS[len(found) % len(TASKS)].format(topic=note.topic)
        for prompt in (*note.asks, f"{note.passage}\n\n{task}"):
            turn = len(found)
            found.append(Example(SYSTEMS[turn % len(SYSTEMS)], prompt, reply(note, turn), note.held_out))
    return found
