"""`python -m benchmarks engine`: our loop over the layers against transformers' own forward and generate."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.base import Advance, BenchOptions, Report, TableRow, Timing, interleave, paired_ratio
from benchmarks.models import load, settle
from benchmarks.prompts import tokens_for
from rekindle.core.request import Request
from rekindle.engine import base
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import InvalidSetting
from rekindle.session.generate import Generation
from rekindle.session.prompt import PromptTokens

SIZES, FEW = (64, 256, 1024), (12, 32)
LONG = 8192  # the size of the long measurements on an accelerator
SUFFIX = 64
QUESTION = 30
BARS = {"prefill_vs_model": 1.05, "decode_vs_generate": 1.10, "batch4_speedup": 1.8, "scattered_long_ms": 110.0}


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything; see `docs/concepts/engine.md` for what it means."""
    advance("load the model")
    engine = load(options)
    if not isinstance(engine, HfEngine):
        engine.close()
        raise InvalidSetting("bench engine compares with transformers: it is for --engine hf. Use bench prefix.")
    measure = _EngineMeasure(engine, options)
    report = Report("engine")
    report.fields |= {"model": engine.name, "device": engine.device}
    report.fields |= {"dtype": engine.placement.dtype_name, "rounds": measure.rounds}
    for part in (measure.prefill, measure.decode, measure.batch, measure.scattered, measure.long, measure.startup):
        advance(part.__name__)
        part(report)
    return report


class _EngineMeasure:
    """The parts of the bench, on one loaded model."""

    def __init__(self, engine: HfEngine, options: BenchOptions) -> None:
        self.engine = engine
        self.rounds = options.rounds(9)
        self._steps = 16 if options.quick else 32
        self._random = options.shape is not None
        self._cuda = engine.placement.device.type == "cuda"
        self._tokens = tokens_for(engine, options, LONG + SUFFIX if self._cuda else max(SIZES) + QUESTION)

    def prefill(self, report: Report) -> None:
        """A whole prompt, up to the logits of its last token."""
        table: list[dict[str, Any]] = []
        for size in (*FEW, *SIZES):
            tokens = self._tokens[:size]
            sequence = self._open(size)
            jobs = {"model": partial(self._forward, tokens), "ours": partial(self._fill, sequence, tokens)}
            times = self._interleave(jobs)
            got, expected = self._fill(sequence, tokens), self._forward(tokens)
            sequence.close()
            ratio = paired_ratio(times["ours"], times["model"])
            table.append(
                {
                    "tokens": size,
                    "ours": times["ours"].as_json(),
                    "model": times["model"].as_json(),
                    "ratio": ratio,
                    "largest_logit_difference": float(np.abs(got - expected).max()),
                }
            )
            report.rows.append(_row(f"prefill {size} tokens", times["ours"], times["model"], ratio, "<= 1.05"))
        report.fields["prefill"] = table
        report.fields["prefill_vs_model"] = max(entry["ratio"] for entry in table)

    def decode(self, report: Report) -> None:
        """One token after the other: our generation loop against `model.generate`."""
        table: list[dict[str, Any]] = []
        for size in SIZES:
            tokens = self._tokens[:size]
            ours: list[list[float]] = []
            theirs: list[list[float]] = []
            equal = True
            for _ in range(self.rounds + 1):
                expected, their_steps = self._generate(tokens)
                got, our_steps = self._generate_ours(tokens)
                equal = equal and got == expected
                ours.append(our_steps)
                theirs.append(their_steps)
            # Turn by turn: the machine's mood changes between turns more than within one.
            ratio = statistics.median(
                statistics.median(a) / statistics.median(b) for a, b in zip(ours[1:], theirs[1:], strict=True)
            )
            timings = Timing(tuple(chain(*ours[1:]))), Timing(tuple(chain(*theirs[1:])))
            table.append(
                {
                    "context_tokens": size,
                    "ours": timings[0].as_json(),
                    "generate": timings[1].as_json(),
                    "ratio": ratio,
                    "greedy_equal": None if self._random else equal,
                }
            )
            report.rows.append(_row(f"decode at {size} tokens", *timings, ratio, "<= 1.10"))
        report.fields["decode"] = table
        report.fields["decode_vs_generate"] = max(entry["ratio"] for entry in table)
        if self._random:
            report.fields |= {"greedy_equal": None, "greedy_equal_reason": "random weights have no likeliest token"}
        else:
            report.fields["greedy_equal"] = all(entry["greedy_equal"] for entry in table)

    def batch(self, report: Report) -> None:
        """Four sequences decoded together, against the same four one after the other."""
        size = 256
        sequences = [self._open(size + 1) for _ in range(4)]
        for shift, sequence in enumerate(sequences):
            self.engine.step([base.Row.following(sequence, self._tokens[shift : shift + size], logits="none")])

        def together(chosen: list[Any]) -> None:
            self.engine.step([base.Row.following(sequence, self._tokens[:1]) for sequence in chosen])
            for sequence in chosen:
                sequence.truncate(size)

        def in_turn() -> None:
            for sequence in sequences:
                together([sequence])

        jobs = {"together": lambda: together(sequences), "in turn": in_turn}
        times = self._interleave(jobs, rounds=4 * self.rounds)
        for sequence in sequences:
            sequence.close()
        speedup = paired_ratio(times["in turn"], times["together"])
        report.fields["batch4"] = {name: timing.as_json() for name, timing in times.items()}
        report.fields["batch4_speedup"] = speedup
        row = _row("4 rows, one token each", times["together"], times["in turn"], speedup, ">= 1.8")
        report.rows.append(row)

    def scattered(self, report: Report) -> None:
        """30 % of a prompt's positions recomputed over kept KV, and a question after it, against all of it."""
        size = max(SIZES)
        times = self._scattered(size, QUESTION)
        ratio = paired_ratio(times["scattered"], times["full"])
        report.fields["scattered30"] = {name: timing.as_json() for name, timing in times.items()}
        report.fields["scattered30_vs_full"] = ratio
        report.rows.append(_row(f"30 % of {size} + {QUESTION} tokens", times["scattered"], times["full"], ratio))

    def long(self, report: Report) -> None:
        """The same at 8,192 tokens, on an accelerator."""
        names = ("prefill_long_vs_model", "scattered_long_ms", "suffix_long_ms", "suffix_floor_ms")
        if not self._cuda:
            report.fields |= dict.fromkeys(names, None)
            report.fields["long_reason"] = f"{LONG} tokens are measured on CUDA only"
            return
        tokens = self._tokens[:LONG]
        sequence = self._open(LONG + SUFFIX)
        times = self._interleave({"model": lambda: self._forward(tokens), "ours": lambda: self._fill(sequence, tokens)})
        ratio = paired_ratio(times["ours"], times["model"])
        suffix = self._tokens[LONG : LONG + SUFFIX]
        short = self._interleave({"suffix": lambda: self._append(sequence, suffix)})["suffix"]
        sequence.close()
        mixed = self._scattered(LONG, SUFFIX)
        floor = self._floor()
        report.fields |= {
            "prefill_long": {name: timing.as_json() for name, timing in times.items()},
            "prefill_long_vs_model": ratio,
            "scattered_long_ms": mixed["scattered"].median * 1e3,
            "scattered_long_vs_full": paired_ratio(mixed["scattered"], mixed["full"]),
            "suffix_long_ms": short.median * 1e3,
            "suffix_floor_ms": floor.median * 1e3,
        }
        report.rows += [
            _row(f"prefill {LONG} tokens", times["ours"], times["model"], ratio, "<= 1.05"),
            _row(
                f"30 % of {LONG} + {SUFFIX} tokens",
                mixed["scattered"],
                mixed["full"],
                paired_ratio(mixed["scattered"], mixed["full"]),
            ),
            _row(f"{SUFFIX} tokens after {LONG}", short, floor, short.median / floor.median, "weights read once"),
        ]

    def startup(self, report: Report) -> None:
        """A fresh interpreter: `import rekindle` and `rekindle --help`."""
        pause = [sys.executable, "-c", "pass"]
        jobs = {
            "nothing": lambda: _spawn(pause),
            "import": lambda: _spawn([sys.executable, "-c", "import rekindle"]),
            "help": lambda: _spawn([sys.executable, "-m", "rekindle", "--help"]),
        }
        times = self._interleave(jobs, rounds=3)
        report.fields["import_seconds"] = max(0.0, times["import"].median - times["nothing"].median)
        report.fields["help_seconds"] = times["help"].median
        report.rows.append(TableRow("import rekindle", f"{report.fields['import_seconds']:.3f} s", bar="< 0.2 s"))
        report.rows.append(TableRow("rekindle --help", f"{report.fields['help_seconds']:.3f} s", bar="< 0.5 s"))

    def _scattered(self, size: int, question: int) -> dict[str, Timing]:
        tokens = self._tokens[:size] + self._tokens[:question]
        chosen = np.sort(np.random.default_rng(0).choice(size, size * 3 // 10, replace=False))
        positions = np.concatenate([chosen, np.arange(size, size + question)])
        mixed = [tokens[p] for p in positions]
        sequence, fresh = self._open(size + question), self._open(size + question)
        self._fill(sequence, tokens[:size])

        def scattered() -> None:
            self.engine.step([base.Row(sequence, mixed, positions)])
            sequence.truncate(size)

        times = self._interleave({"full": lambda: self._fill(fresh, tokens), "scattered": scattered})
        sequence.close()
        fresh.close()
        return times

    def _open(self, capacity: int) -> Any:
        return self.engine.open(capacity, self.engine.regime(capacity))

    def _fill(self, sequence: Any, tokens: list[int]) -> Any:
        sequence.truncate(0)
        (logits,) = self.engine.step([base.Row.following(sequence, tokens)])
        return logits

    def _append(self, sequence: Any, tokens: list[int]) -> None:
        length = sequence.length
        self.engine.step([base.Row.following(sequence, tokens)])
        sequence.truncate(length)

    def _forward(self, tokens: list[int]) -> Any:
        """transformers' own: the same work, with its cache, and the logits of the last token only."""
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.engine.model.device)
            return self.engine.model(ids, logits_to_keep=1).logits[0].float().cpu().numpy()

    def _generate(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        watch = _TokenClock(partial(settle, self.engine))
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.engine.model.device)
            count = self._steps + 1
            output = self.engine.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                streamer=watch,
            )
        return output[0, len(tokens) :].tolist(), watch.steps()

    def _generate_ours(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """The loop that `Session` runs, with a clock at every token."""
        request = Request(tuple(tokens), max_tokens=self._steps + 1, min_tokens=self._steps + 1)
        generation = Generation(self.engine, request, PromptTokens(tuple(tokens)), started=0.0)
        sequence = self._open(generation.capacity)
        clock = [time.perf_counter()]
        generation.take(self._fill(sequence, tokens))
        while generation.finish_reason is None:
            clock.append(time.perf_counter())
            generation.take(self.engine.step([generation.row(sequence)])[0])
        clock.append(time.perf_counter())
        sequence.close()
        steps = [after - before for before, after in pairwise(clock[1:])]
        return list(generation.context[len(tokens) :]), steps

    def _floor(self) -> Timing:
        """The time to read all weights once: what no short prefill can go below."""
        weights = [parameter.detach() for parameter in self.engine.model.parameters()]

        def read() -> None:
            for weight in weights:
                weight.sum()

        return self._interleave({"floor": read})["floor"]

    def _interleave(self, jobs: Mapping[str, Callable[[], object]], rounds: int | None = None) -> dict[str, Timing]:
        return interleave(jobs, rounds or self.rounds, partial(settle, self.engine))


class _TokenClock:
    """A streamer for `generate` that only notes when tokens come."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._at: list[float] = []

    def put(self, _: object) -> None:
        """A token came (first the prompt)."""
        self._settle()
        self._at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""

    def steps(self) -> list[float]:
        """The times between tokens after the first."""
        return [after - before for before, after in pairwise(self._at[1:])]


def _row(measure: str, ours: Timing, theirs: Timing, ratio: float, bar: str = "") -> TableRow:
    return TableRow(measure, str(ours), str(theirs), f"{ratio:.3f}", bar)


def _spawn(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
