"""`rekindle serve` with replies that a file decides: python -m tests.clients.scripted_serve REPLIES LOG serve MODEL ...

A model whose name begins with `scripted` computes nothing; any other is loaded and computes as always. Both say the
reply of REPLIES (JSON: what a prompt says, then the reply) whose key stands last in the prompt. LOG gets a line a
reply: the tokens of the prompt and of the reply, and how many were computed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.cache import inflight, stored_kv
from rekindle.cache.cost import AlwaysReuse
from rekindle.cli.entry import main
from rekindle.core.request import Sampling
from rekindle.engine.base import Engine, Reserve
from rekindle.engine.load import EngineOptions, load_engine
from rekindle.models import sources
from rekindle.models.download import Progress
from rekindle.session import session as session_module
from rekindle.session.reply_stream import ReplyStream
from tests.server.scripted import ScriptedEngine

PATIENCE_SECONDS = 120.0
writing = threading.Lock()
asked = threading.local()  # `prompt`: of the reply that this thread makes


class Recited:
    """Draws the tokens of a reply, whatever the model computes."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens)

    def draw(self, logits: NDArray[np.float32]) -> int:
        return self._left.pop(0)


def next_reply(replies: dict[str, str], prompt: str) -> str:
    """The reply to what was said last."""
    last = max(replies, key=prompt.rfind)
    return replies[last] if last in prompt else "Nothing to do."


def loader(replies: dict[str, str]) -> Callable[..., Engine]:
    """In place of `load_engine`."""

    def load(
        model: str, options: EngineOptions, progress: Progress | None = None, reserve: Reserve | None = None
    ) -> Engine:
        engine: Any
        if model.startswith("scripted"):
            engine = ScriptedEngine([""], seed=len(model))
            engine.name = model
        else:
            engine = load_engine(model, options, progress, reserve)
        stop = min(engine.tokenizer.stop_ids)

        def sampler(_: Sampling, context: Sequence[int]) -> Recited:
            asked.prompt = list(context)
            return Recited([*engine.tokenizer.encode(next_reply(replies, engine.tokenizer.decode(context))), stop])

        engine.sampler = sampler
        return engine  # type: ignore[no-any-return]

    return load


class LoggedStream(ReplyStream):
    """Writes a line when the reply is whole."""

    log: Path

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            if self._reply is not None and getattr(asked, "prompt", None) is not None:
                said = {"prompt": asked.prompt, "reply": self._reply.tokens, "computed": self._reply.reuse.computed}
                asked.prompt = None
                with writing, self.log.open("a", encoding="utf-8") as file:
                    print(json.dumps(said), file=file)
            raise


if __name__ == "__main__":
    replies_file, log, *arguments = sys.argv[1:]
    LoggedStream.log = Path(log)
    session_module.load_engine = loader(json.loads(Path(replies_file).read_text("utf-8")))  # type: ignore[assignment]
    name_of = sources.name_of
    sources.name_of = lambda spec: spec if spec.startswith("scripted") else name_of(spec)
    session_module.ReplyStream = LoggedStream  # type: ignore[misc]
    # As in all tests: what is stored is reused though this model computes in no time, and a slow machine is no miss.
    stored_kv.recall_costs = lambda engine: AlwaysReuse()  # type: ignore[assignment]
    stored_kv.LOOKUP_SECONDS = stored_kv.LOAD_SECONDS = inflight._WRITE_SECONDS = PATIENCE_SECONDS
    sys.argv = ["rekindle", *arguments]
    main()
