"""`make turns`: a chat of ten turns, here and with llama.cpp's own server (the one in the wheel), turn by turn.

Both get the same tokens, each in a process of its own, in turns; after the fifth turn both are restarted, and in the
eighth the question before is asked in other words. Printed is what each computed and when its first token came.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from rekindle.errors import RekindleError

TURNS, RESTART, CHANGED = 10, 5, 7
SYSTEM_WORDS, QUESTION_WORDS, REPLY = 300, 40, 16
CONTEXT = 4096


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of `rekindle list`, or a GGUF file")
    parser.add_argument("--no-swa-full", action="store_true", help="hold only the window of layers that have one")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "MODEL", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        side, model, folder = chosen.worker
        try:
            (ours if side == "ours" else theirs)(model, folder, swa_full=not chosen.no_swa_full)
        except RekindleError as error:
            sys.exit(f"error: {error}")
        return
    print(json.dumps(compare(chosen.model, swa_full=not chosen.no_swa_full), indent=1))


def compare(model: str, *, swa_full: bool) -> dict[str, Any]:
    """Every turn of both, and medians."""
    from rekindle.machine import describe_machine
    from rekindle.session.calibrate.prompts import sample_text

    words = sample_text().split() * 4
    chat = [{"role": "system", "content": " ".join(words[:SYSTEM_WORDS])}]
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(side, model, folder, swa_full=swa_full) for side in ("ours", "theirs")]
        for turn in range(TURNS):
            if turn == RESTART:
                for worker in workers:
                    worker.restart()
            start = SYSTEM_WORDS + turn * QUESTION_WORDS
            question = {"role": "user", "content": " ".join(words[start : start + QUESTION_WORDS])}
            chat = [*chat[:-2], question] if turn == CHANGED else [*chat, question]
            mine = workers[0].ask({"chat": chat})
            other = workers[1].ask({"tokens": mine.pop("tokens")})
            chat = [*chat, {"role": "assistant", "content": mine.pop("text")}]
            turns.append({"turn": turn + 1, "prompt": mine.pop("prompt"), "rekindle": mine, "llama.cpp": other})
        for worker in workers:
            worker.close()
    return {
        "model": model,
        "machine": describe_machine(),
        "swa_full": swa_full,
        "computed": {side: sum(turn[side]["computed"] for turn in turns) for side in ("rekindle", "llama.cpp")},
        "first_token_s": {
            side: statistics.median(turn[side]["first_token_s"] for turn in turns) for side in ("rekindle", "llama.cpp")
        },
        "turns": turns,
    }


class Worker:
    """One side in a process of its own: a line of JSON each way."""

    def __init__(self, side: str, model: str, folder: str, *, swa_full: bool) -> None:
        self._side = side
        flags = [] if swa_full else ["--no-swa-full"]
        self._command = [sys.executable, __file__, *flags, "--worker", side, model, folder]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """What it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and said why
            print(json.dumps(task), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"The process of {self._side} ended; what it said is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, after it has written what it keeps."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)

    def restart(self) -> None:
        """End it and start another."""
        self.close()
        self._start()


def ours(model: str, folder: str, *, swa_full: bool) -> None:
    """Rekindle, with a cache folder."""
    from rekindle import Session
    from rekindle.core.request import parse_prompt

    settings: dict[str, Any] = {"cache": f"{folder}/cache", "context": CONTEXT, "swa_full": swa_full}
    with Session(model, engine="llamacpp", device="cpu", **settings) as session:
        session.generate("Warm up.", max_tokens=2, reuse="off")
        for line in sys.stdin:
            chat, tokenizer = json.loads(line)["chat"], session.engine.tokenizer
            if tokenizer.template:
                tokens = list(tokenizer.encode_chat(parse_prompt(chat)))
            else:
                tokens = list(tokenizer.encode("\n\n".join(message["content"] for message in chat) + "\n\n"))
            reply = session.generate(tokens, max_tokens=REPLY, min_tokens=REPLY)
            session.flush()
            seconds, computed = reply.timings.first_token_seconds, reply.reuse.computed
            answer = {"computed": computed, "first_token_s": seconds, "text": reply.text, "tokens": tokens}
            print(json.dumps({**answer, "prompt": len(tokens)}), flush=True)


def theirs(model: str, folder: str, *, swa_full: bool) -> None:  # noqa: ARG001  (it keeps nothing on disk)
    """llama.cpp's server as it is, with its prompt cache and its checkpoints in memory."""
    import xllamacpp

    from rekindle.machine import usable_cores
    from rekindle.models.pull import obtain

    params = xllamacpp.CommonParams()
    params.model.path = str(obtain(model).gguf)
    params.n_ctx, params.n_parallel, params.swa_full = CONTEXT, 1, swa_full
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = usable_cores()
    params.warmup = True
    server = xllamacpp.Server(params)
    options = {"temperature": 0.0, "n_predict": REPLY, "ignore_eos": True, "cache_prompt": True}
    server.handle_completions({"prompt": "Warm up.", **options, "n_predict": 2})
    for line in sys.stdin:
        found = server.handle_completions({"prompt": json.loads(line)["tokens"], **options})
        timings = (json.loads(found) if isinstance(found, str) else found)["timings"]
        answer = {"computed": timings["prompt_n"], "first_token_s": timings["prompt_ms"] / 1e3}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
