"""`python -m benchmarks agents`: a coding conversation of 30 turns, as an agent sends it, turn by turn.

Every turn sends the whole conversation so far; its texts were written for this bench (conversation.json), also the
replies, so that all servers get the same prompts. Two sub-agents take turns, the server is restarted, the history is
compacted, and another model is served in between. Rekindle on both engines, llama.cpp's own server on the same library
and the same two engines without a cache are asked one after the other, another one first each turn; each is a process
that is asked over HTTP. Prompts have 500 to 2,500 tokens, tenfold less than agents send: so that it ends in minutes on
two cores.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agents.sides import SIDES, Side, Turned, another_model
from benchmarks.base import Advance, BenchOptions, Report, TableRow, rotated, scratch
from rekindle.engine.load import convert_gguf
from rekindle.errors import InvalidSetting
from rekindle.models.files import ModelFiles
from rekindle.models.pull import obtain

OURS, THEIRS = "rekindle_llamacpp", "llamacpp_server"
SCALE = "prompts of 500 to 2,500 tokens, tenfold less than agents send, for two cores"
_NOT_QUICK = "not measured with --quick: everything is computed each turn"


@dataclass(frozen=True)
class AgentTurn:
    """A request: the chat so far, and what happened before it (or "conversation", "sub-agents")."""

    part: str
    messages: tuple[dict[str, str], ...]


def read_turns() -> Iterator[AgentTurn]:
    """The turns of the conversation. A compaction begins the history again with its own text."""
    told = json.loads(Path(__file__).with_name("conversation.json").read_text("utf-8"))
    begins = {agent: [{"role": "system", "content": text}] for agent, text in told["agents"].items()}
    chats = {agent: list(begin) for agent, begin in begins.items()}
    for turn in told["turns"]:
        agent, event = turn["agent"], turn.get("event")
        if event == "compaction":
            chats[agent] = list(begins[agent])
        chats[agent].append({"role": "user", "content": turn["new"]})
        yield AgentTurn(event or ("conversation" if agent == "main" else "sub-agents"), tuple(chats[agent]))
        chats[agent].append({"role": "assistant", "content": turn["reply"]})


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything."""
    if options.shape is not None:
        raise InvalidSetting("--shape builds models for one engine, and agents compares two. Leave it out.")
    model = obtain(options.model, form="gguf")
    if model.gguf is None:
        raise InvalidSetting(f"{model.name} is no GGUF model, which llama.cpp's server needs. Use another --model.")
    convert_gguf(model)
    names = [name for name in SIDES if not (options.quick and name.startswith("none"))]
    turns = list(read_turns())
    found: list[dict[str, list[Turned]]] = [{name: [] for name in names} for _ in turns]
    for number in range(options.rounds(1, quick=1)):
        with scratch() as folder:
            _measure(model, Path(folder), turns, found, lambda part, number=number: advance(f"{number + 1}: {part}"))
    report = Report("agents")
    report.fields |= {"model": model.name, "engines": ["hf", "llamacpp"], "device": "cpu", "scale": SCALE}
    _add_rows(report, turns, found)
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
                for side in sides:
                    advance(f"{turn.part} of {SIDES[side.name]}")
                    side.stop()
                    if turn.part == "swap":
                        side.start(other)
                        side.stop()
                    side.start(model)
            for side in rotated(sides, number):
                advance(f"turn {number + 1} of {len(turns)}, {SIDES[side.name]}")
                taken[side.name].append(side.ask(turn.messages))
    finally:
        for side in sides:
            side.stop()


def _add_rows(report: Report, turns: Sequence[AgentTurn], found: Sequence[dict[str, list[Turned]]]) -> None:
    """Fields and rows: every turn, then the turns of each part."""
    measured = [
        {"turn": number + 1, "part": turn.part, "prompt_tokens": taken[OURS][-1].prompt_tokens, **_of_sides(taken)}
        for number, (turn, taken) in enumerate(zip(turns, found, strict=True))
    ]
    parts = [_part(name, [turn for turn in measured if turn["part"] == name]) for name in _names(turns)]
    parts.append(_part("all", measured))
    report.fields |= {
        "rounds": len(found[0][OURS]),
        "same_prompts": all(len({one.prompt_tokens for side in taken.values() for one in side}) == 1 for taken in found),
        "parts": parts,
        "turns": measured,
    }
    for part in parts:
        for field, form in (("computed", "{:,.0f}"), ("first_token_s", "{:.2f} s")):
            ours, theirs = (part[side][field] for side in (OURS, THEIRS))
            measure = f"{part['part']}: {'computed tokens' if field == 'computed' else 'first token'}"
            ratio = ours / theirs if field == "computed" else part["first_token_vs_server"]
            report.rows.append(TableRow(measure, form.format(ours), form.format(theirs), f"{ratio:.2f}", "<= 1"))
    for engine in ("llamacpp", "hf"):
        ours, theirs = (parts[-1][f"{kind}_{engine}"] for kind in ("rekindle", "none"))
        for field, form in (("computed", "{:,.0f}"), ("first_token_s", "{:.2f} s")):
            measure = f"{SIDES[f'rekindle_{engine}']}, all turns: {field}"
            known = theirs[field] is not None
            baseline = form.format(theirs[field]) if known else _NOT_QUICK
            ratio = f"{ours[field] / theirs[field]:.2f}" if known else ""
            report.rows.append(TableRow(measure, form.format(ours[field]), baseline, ratio))


def _names(turns: Sequence[AgentTurn]) -> list[str]:
    return list(dict.fromkeys(turn.part for turn in turns))


def _of_sides(taken: dict[str, list[Turned]]) -> dict[str, Any]:
    """What each side took for a turn: the median of the rounds."""
    return {
        side: {
            "computed": rounds[-1].computed,
            "first_token_s": statistics.median(one.first_token_s for one in rounds),
        }
        for side, rounds in taken.items()
    }


def _part(name: str, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Some turns together: tokens are added, times are medians, ratios those of the same turn."""
    sides: dict[str, Any] = {}
    for side in SIDES:
        own = [turn[side] for turn in turns if side in turn]
        sides[side] = {
            "computed": sum(one["computed"] for one in own) if own else None,
            "first_token_s": statistics.median(one["first_token_s"] for one in own) if own else None,
            **({} if own else {"reason": _NOT_QUICK}),
        }
    ratios = [turn[OURS]["first_token_s"] / turn[THEIRS]["first_token_s"] for turn in turns]
    prompts = sum(turn["prompt_tokens"] for turn in turns)
    about = {"part": name, "turns": len(turns), "prompt_tokens": prompts}
    return {**about, **sides, "first_token_vs_server": statistics.median(ratios)}
