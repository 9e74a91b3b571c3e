"""The conversation of `python -m benchmarks agents`, and what the bench makes of measurements. No server is started."""

from __future__ import annotations

from collections import Counter

from benchmarks.agents.bench import OURS, THEIRS, add_rows, read_turns
from benchmarks.agents.sides import SIDES, Turned
from benchmarks.base import Report


def test_every_turn_continues_an_earlier_one_but_for_new_agents_and_a_compaction() -> None:
    turns = list(read_turns())
    parts = Counter(turn.part for turn in turns)
    assert len(turns) == 30 and (parts["restart"], parts["swap"], parts["compaction"]) == (1, 1, 1)
    assert parts["sub-agents"] >= 6
    alone = [
        number
        for number, turn in enumerate(turns)
        if not any(turn.messages[: len(one.messages)] == one.messages for one in turns[:number])
    ]
    systems = {turn.messages[0]["content"] for turn in turns}
    assert len(alone) == len(systems) + 1 == 4 and "compaction" in {turns[number].part for number in alone}


def test_turns_are_summed_and_what_was_not_timed_is_null() -> None:
    turns = list(read_turns())
    found = [{side: [Turned(100, 10, 0.5)] for side in SIDES} for _ in turns]
    for taken in found[1:]:
        taken[THEIRS] = [Turned(100, 20, 1.0)]
        del taken["none_hf"]
    report = Report("agents")
    add_rows(report, turns, found)
    everything = report.fields["parts"][-1]
    assert everything["part"] == "all" and everything[OURS] == {"computed": 300, "first_token_s": 0.5}
    assert everything["vs_server"] == {"computed": 300 / 590, "first_token_s": 0.5}
    assert report.fields["turns"][1]["none_hf"] == {"computed": 100, "first_token_s": None}
    assert report.fields["same_prompts"] and all(row.measure and row.ours for row in report.rows)
