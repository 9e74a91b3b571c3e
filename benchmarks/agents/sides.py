"""The servers that are compared: each in a process of its own, asked over HTTP, restarted when the bench says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rekindle.machine import usable_cores
from rekindle.models.files import ModelFiles

CONTEXT_TOKENS = 8192
REPLY_TOKENS = 2
SIDES = {  # by the name that their JSON has
    "rekindle_llamacpp": "Rekindle on llama.cpp",
    "llamacpp_server": "llama.cpp's own server",
    "rekindle_hf": "Rekindle on transformers",
    "none_llamacpp": "no cache, llama.cpp",
    "none_hf": "no cache, transformers",
}
THREADS = int(os.environ.get("OMP_NUM_THREADS") or usable_cores())  # of every side
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Turned:
    """What a turn took."""

    prompt_tokens: int
    computed: int
    first_token_s: float


class Side:
    """A server of one kind, with one model at a time."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder / name
        self._folder.mkdir()
        self._url = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model: ModelFiles) -> None:
        """Serve a model, and let it answer once: the first reply of a process is always slower."""
        log = self._folder / "log"
        with log.open("wb") as said:
            self._process = subprocess.Popen(self._command(model), stdout=said, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := re.search(r"http://127\S*?:\d+", log.read_text("utf-8", "replace"))) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{SIDES[self.name]} does not start: {log.read_text('utf-8', 'replace')[-2000:]}")
            time.sleep(0.1)
        self._url = found[0]
        self.ask([{"role": "user", "content": "Hello."}])

    def _command(self, model: ModelFiles) -> list[str]:
        if self.name == "llamacpp_server":
            sizes = [str(CONTEXT_TOKENS), str(THREADS)]
            return [sys.executable, "-m", "benchmarks.agents.llama_server", str(model.gguf), *sizes]
        reuse, engine = self.name.split("_")
        weights = str(model.gguf if engine == "llamacpp" else model.folder)
        options = ["--engine", engine, "--device", "cpu", "--context", str(CONTEXT_TOKENS), "--port", "0"]
        options += ["--cache", str(self._folder / "cache"), *(["--reuse", "off"] if reuse == "none" else [])]
        options += ["--threads", str(THREADS)] if engine == "llamacpp" else []
        return [sys.executable, "-m", "rekindle", "serve", weights, *options]

    def ask(self, messages: Sequence[dict[str, str]]) -> Turned:
        """The reply to a chat; the first token has come when the first text has."""
        body = {
            "messages": messages,
            "max_tokens": REPLY_TOKENS,
            "min_tokens": REPLY_TOKENS,
            "ignore_eos": True,  # llama.cpp's word for it
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first: float | None = None
        events: list[dict[str, Any]] = []
        started = time.perf_counter()
        with httpx.stream(
            "POST", f"{self._url}/v1/chat/completions", json=body, timeout=_PATIENCE_SECONDS, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if first is None and any(one["delta"].get("content") for one in events[-1]["choices"]):
                        first = time.perf_counter() - started
        said = {name: value for event in events for name, value in event.items()}
        if first is None or "usage" not in said:
            raise RuntimeError(f"{SIDES[self.name]} did not reply: {answer.status_code} {events[-1:]}")
        return Turned(said["usage"]["prompt_tokens"], said["timings"]["prompt_n"], first)

    def stop(self) -> None:
        """End the process, as a user would: what it keeps is written first."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_PATIENCE_SECONDS)
            self._process = None


def another_model(model: ModelFiles, folder: Path) -> ModelFiles:
    """A model of the same size with other weights: its last byte differs."""
    gguf, weights = folder / "other.gguf", folder / "other"
    shutil.copyfile(str(model.gguf), gguf)
    shutil.copytree(model.folder, weights)
    for path in (gguf, *weights.glob("*.safetensors")):
        with path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
    return ModelFiles("other", weights, gguf)
