"""What a terminal shows while something takes long."""

from __future__ import annotations

from rekindle.cli import console


def test_the_check_of_the_weights_is_named_and_happens_once() -> None:
    assert console._STAGES["digest"] == "checking the model's weights (first time only)"
