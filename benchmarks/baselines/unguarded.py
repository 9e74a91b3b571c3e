"""Stored answers by similarity alone, as published: nothing else about two questions is compared."""

from __future__ import annotations

from typing import Any

from rekindle.answers.bank import AnswerBank
from rekindle.session.session import Session


def unguard(bank: AnswerBank) -> AnswerBank:
    """The bank, from now on without the guard."""
    setattr(bank, "difference", lambda _question, _entry: None)  # noqa: B010  (of this bank alone)
    return bank


def unguard_session(session: Session) -> None:
    """The same for all banks of a session."""
    answers: Any = session.answers
    opened = answers.bank
    answers.bank = lambda *whose: unguard(opened(*whose))
