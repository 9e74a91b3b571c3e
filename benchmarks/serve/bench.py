"""`python -m benchmarks serve`: first tokens and throughput that clients of a server see, alone and together.

The server runs as `rekindle serve` starts it; the clients talk to it over HTTP. The same requests, whose prompts share
beginnings as a trace says, are asked by 1 client (one after the other), 4 and 16, with the cache and without, in turns.
The cache is empty each time: what it spares, it learnt from the requests before. Then 4 replies at once against the
same 4 in a row. `--workload rag` is another bench: see `rag`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, about, rotated, scratch
from benchmarks.models import load
from benchmarks.prompts import tokens_for
from benchmarks.serve import rag
from benchmarks.serve.clients import ClientRequest, serve_all
from benchmarks.serve.report import SETTINGS, STREAMS, ServeResults, add_rows
from benchmarks.serve.workload import (
    BLOCK_TOKENS,
    Blocks,
    PromptWorkload,
    make_workload,
    read_trace,
    scale,
    shared_share,
)
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.server.serve import Server
from rekindle.server.service import DEFAULT_PARALLEL
from rekindle.session.session import Session
from rekindle.settings import ServerSettings

_STREAM_TOKENS = 64  # of each reply that is compared with itself in company
_STREAM_PROMPT_TOKENS = 64
_WARM_UP_TOKENS = 4
_TEXT_TOKENS = 4000


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything, over loopback. The model is loaded before."""
    if options.workload not in (None, "trace", "rag"):
        raise InvalidSetting(f"--workload {options.workload!r} is unknown. Use trace or rag.")
    if options.workload == "rag":
        return rag.run(options, advance)
    advance("load the model")
    trace = read_trace(options.data)
    engine = load(options)
    report = Report("serve")
    report.fields |= about(engine, options)
    found = ServeResults(options.shape is not None, shared_share(trace), parallel=DEFAULT_PARALLEL)
    stream = tokens_for(engine, replace(options, data=None), _TEXT_TOKENS)
    with scratch() as folder:
        session = Session(engine, cache=folder, memory_limit="4GB", disk_limit="90%", parallel=DEFAULT_PARALLEL)
        with Server(session, ServerSettings(port=0)).running() as url:  # which closes the session
            measure = _ServeMeasure(url, session, options, found)
            measure.loads(list(_workloads(engine, options, trace, stream)), advance)
            measure.streams(stream, advance)
    engine.close()
    add_rows(report, found)
    return report


def _workloads(
    engine: Engine, options: BenchOptions, trace: Sequence[Blocks], stream: Sequence[int]
) -> Iterator[PromptWorkload]:
    """One for each round, of other conversations; short ones if it shall be quick, and no longer than the model takes.

    Each has as many requests as clients ask at the same time, at least.
    """
    requests, max_blocks = (16, 4) if options.quick else (32, 12)
    fits = (engine.context_tokens - _STREAM_TOKENS) // BLOCK_TOKENS - 1
    for turn in range(options.rounds(3, quick=1)):
        seed = options.seed + turn
        asked = scale(trace, requests, max(1, min(max_blocks, fits)), np.random.default_rng(seed))
        yield make_workload(asked, stream, engine.tokenizer.vocabulary_size, seed)


class _ServeMeasure:
    """The parts of the bench, on one server."""

    def __init__(self, url: str, session: Session, options: BenchOptions, found: ServeResults) -> None:
        self._url, self._session, self._options, self._found = url, session, options, found
        self._salts = 0

    def loads(self, workloads: list[PromptWorkload], advance: Advance) -> None:
        """All settings on each workload, another one first each time."""
        found = self._found
        tokens = 8 if self._options.quick else 32
        found.reply_tokens = tokens
        found.prompt_tokens = [len(prompt) for load in workloads for prompt in load.prompts]
        found.shared = [load.shared_share for load in workloads]
        first = workloads[0].prompts
        for salt in (None, self._new_salt()):  # the first of its kind is always slower
            serve_all(self._url, [ClientRequest(prompt, _WARM_UP_TOKENS, salt) for prompt in first[:STREAMS]], STREAMS)
        for turn, workload in enumerate(workloads):
            for setting in rotated(SETTINGS, turn):
                advance(f"{setting}, {len(workload.prompts)} requests, {turn + 1} of {len(workloads)}")
                salt = self._new_salt() if setting.cache else None
                asks = [ClientRequest(prompt, tokens, salt) for prompt in workload.prompts]
                found.served[setting].append(serve_all(self._url, asks, setting.clients))
                self._session.flush()

    def streams(self, stream: Sequence[int], advance: Advance) -> None:
        """The same replies one after the other and at once; their prompts are known, so that replies are compared."""
        salt = self._new_salt()
        cuts = range(0, STREAMS * _STREAM_PROMPT_TOKENS, _STREAM_PROMPT_TOKENS)
        prompts = [tuple(stream[start : start + _STREAM_PROMPT_TOKENS]) for start in cuts]
        serve_all(self._url, [ClientRequest(prompt, _WARM_UP_TOKENS, salt) for prompt in prompts], STREAMS)
        asks = [ClientRequest(prompt, _STREAM_TOKENS, salt) for prompt in prompts]
        rounds = self._options.rounds(5, quick=2)
        self._found.stream_tokens = _STREAM_TOKENS
        for turn in range(rounds):
            advance(f"{STREAMS} streams, {turn + 1} of {rounds}")
            self._found.row.append(serve_all(self._url, asks, 1))
            self._found.together.append(serve_all(self._url, asks, STREAMS))

    def _new_salt(self) -> str:
        """A cache of its own, which is empty."""
        self._salts += 1
        return f"bench-{self._salts}"
