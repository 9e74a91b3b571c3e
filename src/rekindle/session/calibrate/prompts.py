"""What a model is calibrated with: questions about passages, and the earlier prompts that the passages are known from.

prompt    [a1][a2][a3][a4][a5] question a
donors    [c2][a1][b4][d5]     question x        every passage stands in exactly one donor, with passages of other
          [a2][d1][e3]         question y        prompts around it and another question behind it
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rekindle.answers.ask_terms import asking
from rekindle.core.document import Quote
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.session.prompt import PromptTokens, encode_prompt

PASSAGES = 5  # of a prompt
DONOR_PASSAGES = (3, 5)  # from, to
_PASSAGE_WORDS = 100  # at most
_NO_QUESTION = "What do these passages tell?"


@dataclass(frozen=True)
class PassageQuestion:
    """A question, the passages that come with it (those that answer it first, if that is marked), and its answers."""

    question: str
    paragraphs: tuple[Quote, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class PassagePrompt:
    """A question about passages as it is asked, with the answers that are right."""

    question: str
    quotes: tuple[Quote, ...]
    answers: tuple[str, ...] = ()

    def request(self, **options: str) -> Request:
        """How it is asked."""
        return Request.of(asking(self.question), documents=self.quotes, max_tokens=1, **options)  # type: ignore[arg-type]

    def encode(self, engine: Engine) -> PromptTokens:
        """Its tokens."""
        return encode_prompt(engine, self.request())


def sample_text() -> str:
    """A text of about 1,200 tokens that comes with the package."""
    return (resources.files("rekindle") / "samples" / "text.txt").read_text("utf-8")


def read_questions(folder: Path | None) -> list[PassageQuestion]:
    """The questions of a folder in the order of its files, or those that come with the package.

    A folder, or the folders in it, has `.jsonl` files whose records have `question`, `contexts` [{title, text,
    is_supporting}] and perhaps `answers`; files of other records are passed over. Raises `InvalidSetting` for what is
    no folder or no JSON.
    """
    if folder is None:
        sample = (resources.files("rekindle") / "samples" / "questions.jsonl").read_text("utf-8")
        return list(_questions(json.loads(line) for line in sample.splitlines()))
    return [one for path in _files(folder, "jsonl") for one in _questions(_records(path))]


def read_texts(folder: Path | None) -> list[str]:
    """Texts to choose bits by: the `.txt` and `.md` files of a folder and the passages of its questions, else a sample.

    Raises as `read_questions` does.
    """
    texts = [] if folder is None else [path.read_text("utf-8", "replace") for path in _files(folder, "txt", "md")]
    passages = [f"{quote.title}\n{quote.text}" for one in read_questions(folder) for quote in one.paragraphs]
    if passages:
        texts.append("\n\n".join(dict.fromkeys(passages)))
    return texts if folder is not None else [sample_text(), *texts]


def distinct_prompts(
    questions: Sequence[PassageQuestion], order: random.Random, passages: int = PASSAGES
) -> list[PassagePrompt]:
    """Every question with its first passages, shuffled; a passage that another prompt has is left out.

    Raises `InvalidSetting` if fewer than two questions have enough passages of their own.
    """
    taken: set[Quote] = set()
    prompts = []
    for one in order.sample(questions, len(questions)):
        quotes = [quote for quote in one.paragraphs if quote not in taken][:passages]
        if len(quotes) < passages:
            continue
        taken.update(quotes)
        prompts.append(PassagePrompt(one.question, tuple(order.sample(quotes, len(quotes))), one.answers))
    if len(prompts) < 2:
        raise InvalidSetting(f"The data has fewer than two questions with {passages} passages of their own each.")
    return prompts


def donors_of(
    prompts: Sequence[PassagePrompt], questions: Sequence[PassageQuestion], order: random.Random
) -> tuple[PassagePrompt, ...]:
    """Earlier prompts that have every passage of these prompts once, and no two of the same prompt.

    Each passage goes to an open donor that has none of its own prompt; donors are of different sizes.
    """
    number = {quote: at for at, prompt in enumerate(prompts) for quote in prompt.quotes}
    spare = [quote for one in questions for quote in one.paragraphs if quote not in number]
    spare = order.sample(spare, len(spare))  # passages of no prompt
    growing: list[tuple[int, list[Quote]]] = []  # how many it takes, what it has
    done: list[list[Quote]] = []
    for quote in order.sample(list(number), len(number)):
        free = [donor for donor in growing if all(number[quote] != number[other] for other in donor[1])]
        if free:
            donor = order.choice(free)
        else:
            donor = (order.randint(*DONOR_PASSAGES), [])
            growing.append(donor)
        donor[1].append(quote)
        if len(donor[1]) == donor[0]:
            growing.remove(donor)
            done.append(donor[1])
    first = {prompt.quotes[0] for prompt in prompts}
    donors = []
    for quotes in (*done, *(quotes for _, quotes in growing)):
        while len(quotes) < DONOR_PASSAGES[0] and spare:
            quotes.append(spare.pop())
        quotes.sort(key=lambda quote: quote in first)  # stable: none begins with what its own prompt begins with
        if quotes[0] in first and spare:
            quotes.insert(0, spare.pop())
        own = {prompts[number[quote]].question for quote in quotes if quote in number}
        others = [one.question for one in questions if one.question not in own] or [_NO_QUESTION]
        donors.append(PassagePrompt(order.choice(others), tuple(quotes)))
    return tuple(donors)


def _questions(records: Iterable[Any]) -> Iterator[PassageQuestion]:
    for record in records:
        if not isinstance(record, Mapping) or not isinstance(record.get("contexts"), list) or "question" not in record:
            return  # a file of something else
        contexts = [one if isinstance(one, Mapping) else {"text": one} for one in record["contexts"]]
        marked = sorted(contexts, key=lambda one: not one.get("is_supporting"))  # stable
        quotes = [Quote(_cut(str(one["text"])), str(one.get("title", ""))) for one in marked if one.get("text")]
        answers = tuple(map(str, record.get("answers") or ()))
        yield PassageQuestion(str(record["question"]), tuple(dict.fromkeys(quotes)), answers)


def _cut(text: str) -> str:
    return " ".join(text.split()[:_PASSAGE_WORDS])


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """The files with these suffixes in a folder, or else in the folders in it."""
    if not folder.is_dir():
        raise InvalidSetting(f"There is no folder {folder}. Give --data a folder with .jsonl files.")
    found = ([path for suffix in suffixes for path in folder.glob(f"{under}*.{suffix}")] for under in ("", "*/"))
    return sorted(next(found) or next(found))


def _records(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InvalidSetting(f"{path}, line {number} is not JSON ({error}).") from error
