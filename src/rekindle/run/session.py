"""A model ready to answer: the life of a request.

request   what people write becomes a `Request`            core/request
tokens    the model's own template, within its context     run/prompt
prefill   the prompt's KV into a sequence                  run/prefill
decode    tokens to text, cancellable at every one         run/generate
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from rekindle.core.request import MessageLike, Options, PromptLike, Reply, Request, parse_prompt
from rekindle.engine.base import Engine
from rekindle.errors import Closed
from rekindle.models.download import Progress
from rekindle.run.generate import Generation, decode
from rekindle.run.load import EngineOptions, load_engine
from rekindle.run.prompt import encode_prompt
from rekindle.run.stream import AsyncStream, Stream

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Session:
    """One loaded model. May be used from several threads and inside a running event loop.

        with Session("smollm2") as session:
            print(session.chat("What is a cache?"))

    model    a name (smollm2), a folder, a .gguf file, ORG/NAME on the hub, or an engine already loaded
    device   auto, cpu, cuda, cuda:1, mps
    dtype    auto, float32, bfloat16, float16
    context  use at most so many tokens of the model's context
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine = "smollm2",
        *,
        engine: str = "hf",
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load the model, pulling it first if it must be. Raises `ModelError`, `EngineMissing`, `InvalidSetting`."""
        self._engine: Engine | None
        if isinstance(model, (str, os.PathLike)):
            options = EngineOptions(engine, device, dtype, context)
            self._engine = load_engine(os.fspath(model), options, progress)
        else:
            self._engine = model

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises `Closed` after `close`."""
        if self._engine is None:
            raise Closed("The session was closed. Make a new one.")
        return self._engine

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Reply:
        """Continue a plain text or a list of token ids.

        Raises `InvalidPrompt`, `InvalidSampling`, `InvalidSetting` or `ContextOverflow`.
        """
        return self.stream(prompt, **options).reply

    def chat(self, messages: str | Sequence[MessageLike], **options: Unpack[Options]) -> Reply:
        """Answer a chat: a list of `{"role": ..., "content": ...}`, or the text of a single user message.

        `overflow="drop-oldest"` lets the oldest messages go when the chat outgrows the context; system messages and
        the last message always stay. Raises as `generate` does.
        """
        return self.stream(as_messages(messages), **options).reply

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> Stream:
        """The same, piece by piece: text and token ids are continued, messages are answered."""
        request = Request.of(prompt, **options)
        return Stream(lambda cancelled: self._answer(request, cancelled))

    async def agenerate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Reply:
        """`generate` for coroutines: the event loop stays free, cancelling the task stops the model."""
        return await self.astream(prompt, **options).reply()

    async def achat(self, messages: str | Sequence[MessageLike], **options: Unpack[Options]) -> Reply:
        """`chat` for coroutines."""
        return await self.astream(as_messages(messages), **options).reply()

    def astream(self, prompt: PromptLike, **options: Unpack[Options]) -> AsyncStream:
        """`stream` for coroutines: `async for piece in session.astream(...)`."""
        return AsyncStream(self.stream(prompt, **options))

    def _answer(self, request: Request, cancelled: Callable[[], bool]) -> Generator[str, None, Reply]:
        started = time.perf_counter()
        engine = self.engine
        prompt = encode_prompt(engine, request)
        generation = Generation(engine, request, prompt, started=started)
        yield from decode(engine, generation, cancelled)
        return generation.reply()

    def close(self) -> None:
        """Free the model. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self._engine.name if self._engine else 'closed'}>"


def as_messages(messages: str | Sequence[MessageLike]) -> Sequence[MessageLike]:
    """A single text is one user message; it may not be empty."""
    return [{"role": "user", "content": parse_prompt(messages)}] if isinstance(messages, str) else messages
