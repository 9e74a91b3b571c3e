"""A reply while it is being written: an iterator of text that can be cancelled, sync or async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rekindle.core.reply import Reply, TextPiece
from rekindle.errors import Cancelled, RekindleError

_Result = TypeVar("_Result")
Run = Callable[[Callable[[], bool]], Generator[TextPiece, None, Reply]]


class ReplyStream(Iterator[TextPiece]):
    """Pieces of text as they are decoded.

        stream = session.stream("Once upon a time")
        for piece in stream:
            print(piece, end="", flush=True)
        print(stream.reply.summary())

    Leaving the loop early, `close()` or `cancel()` (from any thread) stops the model within a token.
    """

    def __init__(self, run: Run, cancelled: threading.Event | None = None) -> None:
        """Setting `cancelled` is the same as `cancel()`."""
        self._cancelled = cancelled or threading.Event()
        self._pieces = run(self._cancelled.is_set)
        self._reading = threading.Lock()
        self._reply: Reply | None = None

    def __next__(self) -> TextPiece:
        with self._reading:
            try:
                return next(self._pieces)
            except StopIteration as finished:
                self._reply = self._reply or finished.value
            except Cancelled:
                pass
        raise StopIteration

    @property
    def reply(self) -> Reply:
        """The whole reply; reads what is left of the stream first. Raises `Cancelled` if it was cancelled."""
        for _ in self:
            pass
        if self._reply is None and self._cancelled.is_set():
            raise Cancelled("The stream was cancelled before the reply was complete.")
        if self._reply is None:
            raise RekindleError("The reply is incomplete: reading the stream failed before. Ask again.")
        return self._reply

    def cancel(self) -> None:
        """Stop within a token. The loop over the stream then ends."""
        self._cancelled.set()

    def close(self) -> None:
        """Stop and free the context; waits for a token that is being computed."""
        self.cancel()
        with self._reading:
            self._pieces.close()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncReplyStream(AsyncIterator[TextPiece]):
    """Pieces of text for `async for`. The model works in a thread of its own; the event loop stays free.

    Cancelling the task that reads, leaving the loop and calling `aclose()`, or `cancel()` stops within a token.
    """

    def __init__(self, stream: ReplyStream) -> None:
        self._stream = stream
        # Threads of its own: a shared pool could keep a reply waiting behind other people's work. Two, because
        # closing waits for the token that is being read.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rekindle-stream")

    async def __anext__(self) -> TextPiece:
        piece = await self._in_thread(lambda: next(self._stream, None))
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def reply(self) -> Reply:
        """The whole reply; reads what is left of the stream first. Raises `Cancelled` if it was cancelled."""
        return await self._in_thread(lambda: self._stream.reply)

    def cancel(self) -> None:
        """Stop within a token. The loop over the stream then ends."""
        self._stream.cancel()

    async def aclose(self) -> None:
        """Stop and free the context."""
        self._stream.cancel()
        await self._in_thread(self._stream.close)

    async def __aenter__(self) -> AsyncReplyStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` in a thread; if the waiting task is cancelled, stop the model and wait until it has stopped."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark it as seen
            self._stream.cancel()
            await asyncio.wait([loop.run_in_executor(self._threads, self._stream.close)])
            raise
