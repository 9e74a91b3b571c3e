"""`python -m benchmarks agents`: a coding conversation of 30 turns, as an agent sends it, turn by turn.

Every turn sends the whole conversation so far; its texts were written for this bench (conversation.json), also the
replies, so that all servers get the same prompts. Two sub-agents take turns, the server is restarted, the history is
compacted, and another model is served in between. Rekindle on both engines, llama.cpp's own server on the same library
and the same two engines without a cache are asked one after the other, another one first each turn; each is a process
that is asked over HTTP. Prompts are a tenth of what agents send, so that it ends in minutes on two cores, and without a
cache only every eighth turn is timed. With --quick texts are cut short, and nothing is timed without a cache.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agents.sides import SIDES, THREADS, Side, Turned, another_model
from benchmarks.base import Advance, BenchOptions, Report, TableRow, known, rotated, scratch
from rekindle.engine.load import convert_gguf
from rekindle.errors import InvalidSetting
from rekindle.models.files import ModelFiles
from rekindle.models.pull import obtain

OURS, THEIRS = "rekindle_llamacpp", "llamacpp_server"
SCALE = "prompts of 200 to 3,000 tokens, a tenth of what agents send, to end in minutes on two cores"
QUICK_SCALE = "all texts cut short, prompts of 100 to 800 tokens, to end in minutes on two busy cores"
_QUICK_CHARACTERS = {"system": 500, "user": 60, "assistant": 50}
_TIMED_EVERY = 8
_COLUMNS = {"computed": "computed tokens", "first_token_s": "first token"}
_NOT_TIMED = f"no cache: one turn of {_TIMED_EVERY} is timed, because all of it is computed; none with --quick"


@dataclass(frozen=True)
class AgentTurn:
    """A request: the chat so far, and what happened before it (or "conversation", "sub-agents")."""

    part: str
    messages: tuple[dict[str, str], ...]


def read_turns(*, quick: bool = False) -> Iterator[AgentTurn]:
    """The turns of the conversation, its texts cut short if `quick`.

    A compaction begins the history again with its own text.
    """

    def message(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text[: _QUICK_CHARACTERS[role]] if quick else text}

    told = json.loads(Path(__file__).with_name("conversation.json").read_text("utf-8"))
    begins = {agent: [message("system", text)] for agent, text in told["agents"].items()}
    chats = {agent: list(begin) for agent, begin in begins.items()}
    for turn in told["turns"]:
        agent, event = turn["agent"], turn.get("event")
        if event == "compaction":
            chats[agent] = list(begins[agent])
        chats[agent].append(message("user", turn["new"]))
        yield AgentTurn(event or ("conversation" if agent == "main" else "sub-agents"), tuple(chats[agent]))
        chats[agent].append(message("assistant", turn["reply"]))


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything."""
    if options.shape is not None:
        raise InvalidSetting("--shape builds models for one engine, and agents compares two. Leave it out.")
    model = obtain(options.model, form="gguf")
    if model.gguf is None:
        raise InvalidSetting(f"{model.name} is no GGUF model, which llama.cpp's server needs. Use another --model.")
    convert_gguf(model)
    names = [name for name in SIDES if not (options.quick and name.startswith("none"))]
    turns = list(read_turns(quick=options.quick))
    found: list[dict[str, list[Turned]]] = [{name: [] for name in names} for _ in turns]
    for _ in range(options.rounds(1, quick=1)):
        with scratch() as folder:
            _measure(model, Path(folder), turns, found, advance)
    report = Report("agents")
    report.fields |= {"model": model.name, "engines": ["hf", "llamacpp"], "device": "cpu", "threads": THREADS}
    report.fields["scale"] = QUICK_SCALE if options.quick else SCALE
    add_rows(report, turns, found)
    return report


def _measure(
    model: ModelFiles,
    folder: Path,
    turns: Sequence[AgentTurn],
    found: Sequence[dict[str, list[Turned]]],
    advance: Advance,
) -> None:
    """One conversation with all sides, whose caches are empty at its beginning."""
    other = another_model(model, folder)
    sides = [Side(name, folder) for name in found[0]]
    try:
        for side in sides:
            advance(f"start {SIDES[side.name]}")
            side.start(model)
        for number, (turn, taken) in enumerate(zip(turns, found, strict=True)):
            if turn.part in ("restart", "swap"):
                for side in [side for side in sides if not side.name.startswith("none")]:  # which keeps nothing
                    advance(f"{turn.part} of {SIDES[side.name]}")
                    side.stop()
                    if turn.part == "swap":
                        side.start(other)
                        side.stop()
                    side.start(model)
            for side in rotated(sides, number):
                if side.name.startswith("none") and number % _TIMED_EVERY:
                    continue
                advance(f"turn {number + 1} of {len(turns)}, {SIDES[side.name]}")
                taken[side.name].append(side.ask(turn.messages))
    finally:
        for side in sides:
            side.stop()


def add_rows(report: Report, turns: Sequence[AgentTurn], found: Sequence[dict[str, list[Turned]]]) -> None:
    """Fields and rows: every turn, then the turns of each part."""
    measured = [
        {"turn": number + 1, "part": turn.part, **_of_sides(taken)}
        for number, (turn, taken) in enumerate(zip(turns, found, strict=True))
    ]
    names = dict.fromkeys(turn.part for turn in turns)
    parts = [_part(name, [turn for turn in measured if turn["part"] == name]) for name in names]
    parts.append(_part("all", measured))
    prompts = [{one.prompt_tokens for side in taken.values() for one in side} for taken in found]
    report.fields |= {
        "rounds": len(found[0][OURS]),
        "same_prompts": all(len(lengths) == 1 for lengths in prompts),
        "not_timed": _NOT_TIMED,
        "parts": parts,
        "turns": measured,
    }
    for part in parts:
        ours, theirs, ratio = part[OURS], part[THEIRS], part["vs_server"]
        for name, title in _COLUMNS.items():
            shown, baseline = (_show(name, one[name]) for one in (ours, theirs))
            report.rows.append(TableRow(f"{part['part']}: {title}", shown, baseline, f"{ratio[name]:.2f}", "<= 1"))
    for engine in ("llamacpp", "hf"):
        own = [turn for turn in measured if turn[f"none_{engine}"]["first_token_s"] is not None] or measured
        ours, theirs = (_side(f"{kind}_{engine}", own) for kind in ("rekindle", "none"))
        for name, title in _COLUMNS.items():
            ratio = f"{ours[name] / theirs[name]:.2f}" if theirs[name] else ""
            measure = f"{SIDES[f'rekindle_{engine}']} / no cache, {len(own)} turns: {title}"
            report.rows.append(TableRow(measure, _show(name, ours[name]), _show(name, theirs[name]), ratio))


def _show(column: str, value: float | None) -> str:
    if value is None:
        return "not timed"
    return f"{value:,.0f}" if column == "computed" else f"{value:.2f} s"


def _of_sides(taken: dict[str, list[Turned]]) -> dict[str, Any]:
    """What each side took for a turn: the median of the rounds. Without a cache all tokens are computed."""
    tokens = taken[OURS][-1].prompt_tokens
    found: dict[str, Any] = {"prompt_tokens": tokens}
    for side in SIDES:
        rounds = taken.get(side, [])
        seconds = statistics.median(one.first_token_s for one in rounds) if rounds else None
        found[side] = {"computed": rounds[-1].computed if rounds else tokens, "first_token_s": seconds}
    return found


def _part(name: str, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Some turns together; `vs_server` is Rekindle's part of what llama.cpp's server takes."""
    sides = {side: _side(side, turns) for side in SIDES}
    seconds = [turn[OURS]["first_token_s"] / turn[THEIRS]["first_token_s"] for turn in turns]
    computed = sides[OURS]["computed"] / sides[THEIRS]["computed"]
    ratios = {"computed": computed, "first_token_s": statistics.median(seconds)}
    prompts = sum(turn["prompt_tokens"] for turn in turns)
    return {"part": name, "turns": len(turns), "prompt_tokens": prompts, **sides, "vs_server": ratios}


def _side(side: str, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens are added, times are medians of the turns that were timed."""
    timed = known(turn[side]["first_token_s"] for turn in turns)
    return {
        "computed": sum(turn[side]["computed"] for turn in turns),
        "first_token_s": statistics.median(timed) if timed else None,
    }
