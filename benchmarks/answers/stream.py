"""What one person asks, one after the other: questions in their order, and those that come back later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.personal import Person, PersonalSet

Kind = Literal["first", "again", "near"]  # asked for the first time; again in other words; one that only looks alike
LAG = 2  # number of questions between a question and its return


@dataclass(frozen=True)
class Asked:
    """A question of the stream. `gold` is the right answer; None if there is none."""

    text: str
    gold: str | None
    kind: Kind


def stream(person: Person, max_count: int) -> list[Asked]:
    """The first `max_count` questions of a person, each followed by its returns a little later.

    Questions that come back are preferred, so that a short stream has some.
    """
    back = {again.of for again in person.revisits}
    chosen = sorted(range(len(person.questions)), key=lambda i: (person.questions[i].id not in back, i))[:max_count]
    placed: list[tuple[float, Asked]] = []
    for place, number in enumerate(sorted(chosen)):
        question = person.questions[number]
        placed.append((place, Asked(question.text, question.answer, "first")))
        returns = [again for again in person.revisits if again.of == question.id]
        for step, again in enumerate(sorted(returns, key=lambda again: not again.same), start=1):
            kind: Kind = "again" if again.same else "near"
            placed.append((place + LAG + step / 10, Asked(again.text, again.answer, kind)))
    return [asked for _, asked in sorted(placed, key=lambda pair: pair[0])]


def people(sets: list[PersonalSet], users: int) -> list[tuple[str, Person]]:
    """The first users with questions of each set, by the name of their set; first those whose questions come back."""
    found = []
    for some in sets:
        asking = [person for person in some.people if person.questions]
        ordered = sorted(asking, key=lambda person: not person.revisits)
        found += [(some.name, person) for person in ordered[:users]]
    return found
