"""A reply while it is being written: an iterator of text that can be cancelled, sync or async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from rekindle.cache.prefix_cache import PromptPrefill
from rekindle.core.reply import PromptProgress, Reply, Reuse, TextPiece
from rekindle.errors import Cancelled, RekindleError

_Result = TypeVar("_Result")
OnPlanned = Callable[[PromptPrefill, Reuse], None]
Run = Callable[[Callable[[], bool], OnPlanned], Generator[TextPiece, None, Reply]]
_LOOK_SECONDS = 0.2  # between two looks at how far a prompt is read


class ReplyStream(Iterator[TextPiece]):
    """Pieces of text as they are decoded.

        stream = session.stream("Once upon a time")
        for piece in stream:
            print(piece, end="", flush=True)
        print(stream.reply.summary())

    Leaving the loop early, `close()` or `cancel()` (from any thread) stops the model within a token.
    """

    def __init__(self, run: Run, cancelled: threading.Event | None = None, planned: OnPlanned | None = None) -> None:
        """Setting `cancelled` is the same as `cancel()`. `planned` is called before anything is computed."""
        self._cancelled = cancelled or threading.Event()
        listening = self._planned = [] if planned is None else [planned]

        def note_plan(prefill: PromptPrefill, reuse: Reuse) -> None:  # without `self`: unread streams end at once
            for listener in listening:
                listener(prefill, reuse)

        self._pieces = run(self._cancelled.is_set, note_plan)
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

    def watched(self, tell: Callable[[PromptProgress], None]) -> Iterator[TextPiece]:
        """The same pieces. Until the first one, `tell` gets how far the prompt is read, from another thread: first what
        is reused, then whatever is read, at last all of it. An `OSError` of `tell` ends that."""
        plans: list[tuple[PromptPrefill, Reuse]] = []
        self._planned.append(lambda *plan: plans.append(plan))
        ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(plans, tell, ended), name="rekindle-progress", daemon=True)
        watcher.start()
        try:
            first = next(self, None)
        finally:
            ended.set()
            watcher.join()
        plans.clear()  # they hold buffers of the engine
        if first is not None:
            yield first
            yield from self

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


def _watch(
    plans: Sequence[tuple[PromptPrefill, Reuse]], tell: Callable[[PromptProgress], None], ended: threading.Event
) -> None:
    """Tell how far a prompt is read once it is planned, until `ended`."""
    last: PromptProgress | None = None
    over = False
    with suppress(OSError):  # nobody listens any more
        while not over:
            over = ended.wait(_LOOK_SECONDS)
            for prefill, reuse in plans:
                now = prefill.progress(reuse.reused)
                if last is None:
                    last = replace(now, processed=now.cached, expected_seconds=prefill.plan.predicted_seconds)
                    tell(last)
                if now.processed > last.processed:
                    last = now
                    tell(last)


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
