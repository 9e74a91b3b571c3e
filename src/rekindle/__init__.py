"""Rekindle: a language model on your own machine that never prefills the same context twice.

    from rekindle import Session

    with Session("smollm2") as session:
        print(session.chat("Name three colours."))

Everything named in `__all__` is public; it is loaded when first used, so that `import rekindle` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME_OF = {
    "Answer": "rekindle.core.answer",
    "AnswerStream": "rekindle.run.ask",
    "AsyncStream": "rekindle.run.stream",
    "Grammar": "rekindle.core.grammar",
    "Message": "rekindle.core.request",
    "RekindleError": "rekindle.errors",
    "Reply": "rekindle.core.reply",
    "Session": "rekindle.run.session",
    "Settings": "rekindle.settings",
    "Stream": "rekindle.run.stream",
    "attach": "rekindle.integrate.transformers",
}

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncStream",
    "Grammar",
    "Message",
    "RekindleError",
    "Reply",
    "Session",
    "Settings",
    "Stream",
    "__version__",
    "attach",
]

if TYPE_CHECKING:
    from rekindle.core.answer import Answer
    from rekindle.core.grammar import Grammar
    from rekindle.core.reply import Reply
    from rekindle.core.request import Message
    from rekindle.errors import RekindleError
    from rekindle.integrate.transformers import attach
    from rekindle.run.ask import AnswerStream
    from rekindle.run.session import Session
    from rekindle.run.stream import AsyncStream, Stream
    from rekindle.settings import Settings


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
