"""The chat of ten turns that is compared with llama.cpp's own server."""

from __future__ import annotations

import pytest

pytest.importorskip("xllamacpp")

from tools.compare_turns import RESTART, TURNS, compare

pytestmark = [pytest.mark.llamacpp, pytest.mark.real, pytest.mark.long]


def test_a_chat_computes_no_more_than_with_the_server_and_far_less_after_a_restart() -> None:
    turns = compare("smollm2", swa_full=True)["turns"]
    assert len(turns) == TURNS
    for turn in turns:
        assert turn["rekindle"]["computed"] <= turn["llama.cpp"]["computed"]
    restarted = turns[RESTART]
    assert restarted["llama.cpp"]["computed"] == restarted["prompt"] > 5 * restarted["rekindle"]["computed"]
