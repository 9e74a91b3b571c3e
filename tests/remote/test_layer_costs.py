"""What layers cost is learned, remembered for the same model on the same machine, and never trusted when damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rekindle.core.cells import CellGrid
from rekindle.engine.fake import FakeEngine
from rekindle.machine import home_folder
from rekindle.remote.latency import LayerCosts, LayerTiming, Roofline
from tests.tiny import tiny_engine

TRUE = Roofline(1e-4, 2e-5, 3e-8)


def samples(count: int) -> list[LayerTiming]:
    places = [(16 * (1 + number % 8), 128 * (number // 8)) for number in range(count)]
    return [LayerTiming(tokens, context, TRUE.predict(tokens, context)) for tokens, context in places]


def test_what_was_learned_is_known_in_the_next_run() -> None:
    cells = CellGrid(1000, 4)
    first = LayerCosts(FakeEngine())
    assert first.seconds(cells) is None
    first.learn(samples(80))
    assert first.seconds(cells) is None, "nothing is fitted while requests run"
    first.close()
    again = LayerCosts(FakeEngine()).seconds(cells)
    assert again is not None
    expected = [TRUE.predict(len(span), span.start) for span in cells.spans]
    np.testing.assert_allclose(again, np.repeat(np.array(expected)[:, None], 4, axis=1), rtol=0.05)
    assert LayerCosts(tiny_engine("llama")).seconds(cells) is None, "another model"


def test_little_news_changes_nothing() -> None:
    first = LayerCosts(FakeEngine())
    first.learn(samples(10))
    first.close()
    assert not (home_folder() / "layers.json").exists()
    first.learn(samples(80))
    first.close()
    before = (home_folder() / "layers.json").read_text()
    second = LayerCosts(FakeEngine())
    second.learn(samples(3))
    second.close()
    assert (home_folder() / "layers.json").read_text() == before


@pytest.mark.parametrize(
    "damage",
    [
        [],
        "x",
        {"roofline": [-1, 2, 3], "samples": [[1, 2], None, [0, 0, 0], ["a", 1, 1]]},
        {"roofline": None, "samples": {"a": 1}},
    ],
    ids=["list", "text", "numbers", "shapes"],
)
def test_what_is_damaged_is_not_believed(damage: object) -> None:
    first = LayerCosts(FakeEngine())
    first.learn(samples(80))
    first.close()
    path = home_folder() / "layers.json"
    (name,) = json.loads(path.read_text())
    path.write_text(json.dumps({name: damage}))
    second = LayerCosts(FakeEngine())
    assert second.seconds(CellGrid(1000, 4)) is None
    second.learn(samples(80))
    second.close()
    assert second.seconds(CellGrid(1000, 4)) is not None
