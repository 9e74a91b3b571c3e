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
    "Answer": "rekindle.core.reply",
    "AnswerStream": "rekindle.session.ask",
    "AsyncReplyStream": "rekindle.session.reply_stream",
    "Grammar": "rekindle.core.grammar",
    "Message": "rekindle.core.request",
    "RekindleError": "rekindle.errors",
    "Reply": "rekindle.core.reply",
    "Session": "rekindle.session.session",
    "Settings": "rekindle.settings",
    "ReplyStream": "rekindle.session.reply_stream",
    "attach": "rekindle.attached.transformers",
    "calibrate": "rekindle.session.calibrate.calibration",
    "model_folder": "rekindle.models.sources",
}

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncReplyStream",
    "Grammar",
    "Message",
    "RekindleError",
    "Reply",
    "ReplyStream",
    "Session",
    "Settings",
    "__version__",
    "attach",
    "calibrate",
    "model_folder",
]

if TYPE_CHECKING:
    from rekindle.attached.transformers import attach
    from rekindle.core.grammar import Grammar
    from rekindle.core.reply import Answer, Reply
    from rekindle.core.request import Message
    from rekindle.errors import RekindleError
    from rekindle.models.sources import model_folder
    from rekindle.session.ask import AnswerStream
    from rekindle.session.calibrate.calibration import calibrate
    from rekindle.session.reply_stream import AsyncReplyStream, ReplyStream
    from rekindle.session.session import Session
    from rekindle.settings import Settings


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
