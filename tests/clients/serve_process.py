"""`rekindle serve` in a process of its own, whose replies are scripted, and what it computed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120  # after which a test has failed


@dataclass(frozen=True)
class Answered:
    """A prompt, the reply to it, and how many tokens of the prompt were computed."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    computed: int

    def new_tokens(self, before: Sequence[Answered]) -> int:
        """Number of tokens behind the longest beginning that an earlier prompt and its reply had in common with it."""
        known = max((_common(self.prompt, (*one.prompt, *one.reply)) for one in before), default=0)
        return len(self.prompt) - known


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class ServePlace:
    """A folder with the cache, the log and the scripted replies of servers that come and go."""

    folder: Path

    def script(self, replies: dict[str, str]) -> None:
        """Decide what the servers that start from now on reply."""
        (self.folder / "replies.json").write_text(json.dumps(replies), "utf-8")

    def answered(self) -> list[Answered]:
        """Everything answered so far, by all servers."""
        log = self.folder / "log.jsonl"
        lines: list[Any] = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
        return [Answered(tuple(one["prompt"]), tuple(one["reply"]), one["computed"]) for one in lines]

    @contextmanager
    def serving(self, model: str, *options: str) -> Iterator[str]:
        """Serve a model under every name; yields the address."""
        command = [sys.executable, "-m", "tests.clients.scripted_serve", "replies.json", "log.jsonl", "serve", model]
        command += ["--port", "0", "--cache", "cache", "--disk-limit", "2GB", *options]
        command += ["--alias", f"*={Path(model).stem}"]
        own = {"REKINDLE_HOME": str(self.folder / "home"), "REKINDLE_DAEMON": "no", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        said = self.folder / "server.log"
        with said.open("w") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (found := re.search(r"http://\S+?:\d+", said.read_text("utf-8"))):
                assert process.poll() is None and time.monotonic() < deadline, said.read_text("utf-8")
                time.sleep(0.05)
            yield found[0]
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)
        assert process.returncode == 0 and "Traceback" not in said.read_text("utf-8"), said.read_text("utf-8")
