"""The jobs of the commands, and what a session does for them: here in the command's own process, or in the daemon.

A job is a JSON object with its `kind`. While it runs it sends events, and its result is a JSON object.

    generate   prompt, options               text: a piece of the reply           reply, summary
    ask        question, options, spelled    text: a piece of the answer          answer, summary, reuse, spelled
    both of them                             prompt_progress, rekindle: see `PromptProgress`
    warm       prompts, passages             warmed: number done, number in all   prompts, seconds, refused, reasons
    explain    prompt, options, or question  -                                    explanation
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Protocol

from rekindle.core.reply import ChunkReuse, Reuse
from rekindle.core.request import Request
from rekindle.errors import InvalidSetting
from rekindle.session.prompt import encode_prompt
from rekindle.session.reply_stream import ReplyStream
from rekindle.session.session import Session

Job = dict[str, Any]
Event = dict[str, Any]
Send = Callable[[Event], None]


class JobRunner(Protocol):
    """Runs jobs on a model: in this process, in the daemon, or on a server."""

    def run(self, job: Job, send: Send) -> dict[str, Any]:
        """The job's result. `send` gets its events while it runs; leaving by an exception cancels it."""
        ...


def run_job(
    session: Session, job: Job, send: Send, started: Callable[[ReplyStream], None] = lambda _: None
) -> dict[str, Any]:
    """Do a job. `started` gets the stream of its reply, so that another thread can cancel it."""
    result = _KINDS[job["kind"]](session, job, send, started)
    return {"model": session.engine.name, **result}


def _generate(session: Session, job: Job, send: Send, started: Callable[[ReplyStream], None]) -> dict[str, Any]:
    stream = session.stream(job["prompt"], **job["options"])
    started(stream)
    for piece in stream.watched(lambda progress: send(progress.as_event())):
        send({"text": str(piece)})
    reply = stream.reply
    return {"reply": reply.as_dict(), "summary": reply.summary()}


def _ask(session: Session, job: Job, send: Send, started: Callable[[ReplyStream], None]) -> dict[str, Any]:
    stream = session.ask_stream(job["question"], **job["options"])
    started(stream)
    for piece in stream.watched(lambda progress: send(progress.as_event())):
        send({"text": str(piece)})
    answer = stream.answer
    spelled = list(_spelled(session, stream.request, answer.reuse)) if job["spelled"] else []
    return {"answer": answer.as_dict(), "summary": answer.summary(), "reuse": str(answer.reuse), "spelled": spelled}


def _warm(session: Session, job: Job, send: Send, _started: Callable[[ReplyStream], None]) -> dict[str, Any]:
    if session.cache.store is None:
        raise InvalidSetting("There is no cache to warm: leave out --cache off and --reuse off.")
    started = time.perf_counter()
    refused, reasons = _refused(session), session.cache.store.counts.reasons.copy()

    def report(done: int, total: int) -> None:
        send({"warmed": [done, total]})

    done = session.warm(job["prompts"], progress=report)
    if job["passages"] is not None:
        done += session.warm_knowledge(job["passages"], progress=report)
    return {
        "prompts": [{"computed": reuse.computed, "reused": reuse.reused} for reuse in done],
        "seconds": time.perf_counter() - started,
        "refused": _refused(session) - refused,
        "reasons": sorted(session.cache.store.counts.reasons - reasons),
    }


def _explain(session: Session, job: Job, _send: Send, _started: Callable[[ReplyStream], None]) -> dict[str, Any]:
    if job.get("question") is not None:
        request = session.prepare(job["question"]).request
    else:
        request = Request.of(job["prompt"], **job.get("options", {}))
    return {"explanation": session.explain_request(request).as_dict()}


_KINDS = {"generate": _generate, "ask": _ask, "warm": _warm, "explain": _explain}


def _refused(session: Session) -> int:
    """Number of prompts whose KV could not be kept so far."""
    outcomes = session.cache.writer.outcomes if session.cache.writer else {}
    return outcomes.get("refused", 0) + outcomes.get("failed", 0)


def _spelled(session: Session, request: Request, reuse: Reuse) -> Iterator[list[list[Any]]]:
    """The text of each passage in runs of tokens, each with whether it was recomputed; nothing for other passages."""
    tokens = encode_prompt(session.engine, request).tokens
    for chunk in reuse.chunks:
        yield [
            [again, session.engine.tokenizer.spell([tokens[position] for position in run])]
            for again, run in (_runs(chunk) if chunk.source == "reused" else ())
        ]


def _runs(chunk: ChunkReuse) -> Iterator[tuple[bool, list[int]]]:
    chosen = set(chunk.recomputed_positions)
    for again, run in groupby(range(chunk.start, chunk.stop), key=lambda position: position in chosen):
        yield again, list(run)
