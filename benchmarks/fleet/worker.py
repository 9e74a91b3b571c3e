"""A vLLM process of the fleet: its engine runs in the process, requests and events cross a pipe.

Processes are forked from one that has imported vLLM already: that takes a minute on two busy cores, and every worker is
started at least twice.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",  # LMCache's keys are the same in every process
}
BLOCK_SIZE = 32  # tokens: the smallest that vLLM's CPU kernels take
_BLOCKS = 128  # of vLLM's own cache: more than the requests of a round need
START_SECONDS = 600.0
_PRELOADED = ["vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "rekindle.vllm.connector"]
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class VllmConfig:
    """What a worker serves, and through which connector."""

    model: str
    max_tokens: int
    transfer: Mapping[str, Any] | None
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def engine_options(self) -> dict[str, Any]:
        """The options of vLLM's engine."""
        options = {
            "dtype": "float32",
            "max_model_len": self.max_tokens,
            "max_num_seqs": 8,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": _BLOCKS,
            "enforce_eager": True,
            "enable_prefix_caching": True,
        }
        return options if self.transfer is None else {**options, "kv_transfer_config": dict(self.transfer)}


@dataclass
class VllmReply:
    """A greedy reply as the client saw it; with an `error`, only as far as it came."""

    first_token_seconds: float | None = None
    tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    error: str | None = None

    def differs_from(self, text: tuple[int, ...]) -> bool:
        """Whether it came, and says something else."""
        return self.error is None and self.tokens != text


class VllmWorker:
    """The client's side of a worker. Requests may be sent by several threads."""

    def __init__(self, context: Any, config: VllmConfig) -> None:
        """Begins to start it; `wait` until it serves."""
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = context.Process(target=serve, args=(config, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._log = config.log
        self._sending = threading.Lock()
        self._events: dict[int, SimpleQueue[Any]] = {}
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._ended: str | None = None
        self._numbers = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def wait(self) -> None:
        """Wait until it serves. Raises `RuntimeError`."""
        if self._ready.get(timeout=START_SECONDS) is None:
            raise RuntimeError(f"a worker did not start: {self._log.read_text('utf-8', 'replace')[-2000:]}")

    def ask(self, prompt: tuple[int, ...], count: int, salt: str | None, timeout_seconds: float) -> VllmReply:
        """Continue a prompt by `count` tokens."""
        events: SimpleQueue[Any] = SimpleQueue()
        reply, began = VllmReply(), time.perf_counter()
        with self._sending:
            self._numbers += 1
            number, self._events[self._numbers] = self._numbers, events
            with suppress(OSError):
                self._pipe.send((number, prompt, count, salt))
            if self._ended is not None:
                events.put(None)
        while reply.error is None:
            try:
                event = events.get(timeout=max(0.0, began + timeout_seconds - time.perf_counter()))
            except Empty:
                reply.error = f"no reply within {timeout_seconds:.0f} s"
                break
            if event is None:
                reply.error = self._ended or "the worker ended"
                break
            tokens, cached, finished = event
            if reply.first_token_seconds is None and tokens:
                reply.first_token_seconds = time.perf_counter() - began
            reply.tokens, reply.cached_tokens = tokens, cached
            if finished:
                break
        with self._sending:
            del self._events[number]
        return reply

    def kill(self) -> None:
        """End it at once, as a machine does that loses power."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """End it as an operator would: what its connector keeps is written first."""
        with suppress(OSError), self._sending:
            self._pipe.send(None)
        self._process.join(_STOP_SECONDS)
        self.kill()

    def _receive(self) -> None:
        try:
            self._ready.put(self._pipe.recv())
            while True:
                number, *event = self._pipe.recv()
                with self._sending:
                    if number in self._events:
                        self._events[number].put(event)
        except (EOFError, OSError):
            with self._sending:
                self._ended = "the worker ended"
                for events in self._events.values():
                    events.put(None)
            self._ready.put(None)


def worker_context() -> Any:
    """How worker processes are made: forked from one that has imported what they need."""
    os.environ.update(VLLM_ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def serve(config: VllmConfig, pipe: Connection) -> None:
    """The worker's process."""
    os.environ.update(config.environment)
    log = os.open(config.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    _let_vllm_look_into_llvmlite()
    engine = LLMEngine.from_engine_args(EngineArgs(model=config.model, **config.engine_options()))
    core: Any = engine.engine_core.engine_core
    pipe.send("ready")
    serving = True
    while serving:
        busy = core.scheduler.has_requests()  # with those that are over, and whose KV is still being saved
        while pipe.poll(0.0 if busy else None):
            asked = pipe.recv()
            if asked is None:
                serving = False
                break
            number, prompt, count, salt = asked
            how = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            given = {"prompt_token_ids": list(prompt), **({"cache_salt": salt} if salt else {})}
            engine.add_request(str(number), given, how)
            busy = True
        outputs = engine.step()
        if not outputs and core.scheduler.has_requests():
            time.sleep(0.001)  # as vLLM's own loop does: threads that load KV need the interpreter
        for output in outputs:
            tokens = tuple(output.outputs[0].token_ids)
            pipe.send((int(output.request_id), tokens, output.num_cached_tokens or 0, output.finished))
    engine.engine_core.shutdown()


def _let_vllm_look_into_llvmlite() -> None:
    """LMCache imports llvmlite, whose library takes every attribute for a function of its own; vLLM 0.32.0 asks all
    objects of all modules for `__dict__` where its worker runs in the process, and fails."""
    ffi: Any = importlib.import_module("llvmlite.binding.ffi")
    ffi.lib._fntab["__dict__"] = {}
