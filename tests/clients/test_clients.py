"""Real clients do a task of two tool rounds and never have more computed than is new: in a second conversation, after
a restart, with two agents that take turns, and after another model was served from the same cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from rekindle.models.pull import obtain
from tests.clients.agents import PACKAGES, Client, make_client, why_not
from tests.clients.serve_process import Answered, ServePlace
from tests.clients.tiny_long import CONTEXT, write_tiny_long

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

SPARE_TOKENS = 64  # computed in a turn besides the new ones, at most
REPEATED_SHARE = 0.75  # of a prompt, at least, in every conversation after the first


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("xllamacpp")
    folder, vocabulary_of = tmp_path_factory.mktemp("models"), obtain("smollm2", form="gguf").gguf
    assert vocabulary_of is not None
    return [str(write_tiny_long(folder / f"tiny-{seed}.gguf", vocabulary_of, seed=seed)) for seed in range(2)]


@pytest.fixture(params=["scripted", "tiny weights"])
def models(request: pytest.FixtureRequest) -> list[str]:
    """The model, and another one."""
    if request.param == "scripted":
        return ["scripted", "scripted-other"]
    tiny: list[str] = request.getfixturevalue("tiny_models")
    return tiny


@pytest.fixture(params=PACKAGES)
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return make_client(request.param, tmp_path)


def test_only_what_is_new_is_computed(client: Client, models: list[str], tmp_path: Path) -> None:
    tasks = ["first", "second", "third", "elsewhere", "fourth"]
    replies = client.team("one", "two")
    for task in tasks:
        replies |= client.two_rounds(task)
    place = ServePlace(tmp_path)
    place.script(replies)
    options = ["--context", str(CONTEXT)] if models[0].endswith(".gguf") else []

    with place.serving(models[0], *options) as url:
        assert_done(client, client.run(url, "first"), "first")
        assert_only_new(place.answered(), 0)
        count = len(place.answered())
        assert count >= 3, "two tool rounds are three requests"
        assert_done(client, client.run(url, "second"), "second")
        assert_only_new(place.answered(), count, repeated=True)
        assert_no_error(url)

    with place.serving(models[0], *options) as url:  # after a restart
        count = len(place.answered())
        assert_done(client, client.run(url, "third"), "third")
        assert_only_new(place.answered(), count, repeated=True)
        count = len(place.answered())
        client.run_team(url, "one", "two")
        assert_files(client, "one", "two")
        assert_only_new(place.answered(), count)
        assert_no_error(url)

    before = place.answered()
    with place.serving(models[1], *options) as url:
        assert_done(client, client.run(url, "elsewhere"), "elsewhere")
        other = place.answered()[len(before) :]
        assert other[0].computed == len(other[0].prompt), "KV of one model was given to another"

    with place.serving(models[0], *options) as url:  # and the first again
        assert_done(client, client.run(url, "fourth"), "fourth")
        after = place.answered()[len(before) + len(other) :]
        assert_only_new([*before, *after], len(before), repeated=True)


def assert_done(client: Client, printed: str, task: str) -> None:
    assert f"DONE {task}" in printed
    assert_files(client, task)


def assert_files(client: Client, *tasks: str) -> None:
    for task in tasks:
        assert (client.project / f"{task}.txt").read_text("utf-8").strip() == task


def assert_only_new(answered: Sequence[Answered], start: int, *, repeated: bool = False) -> None:
    """From the reply `start` on. `repeated`: most of each prompt was sent before."""
    assert len(answered) > start
    for number in range(start, len(answered)):
        one, new = answered[number], answered[number].new_tokens(answered[:number])
        turn = f"turn {number - start}: {one.computed} of {len(one.prompt)} computed, {new} new"
        assert one.computed <= new + SPARE_TOKENS, turn
        assert not repeated or new <= len(one.prompt) * (1 - REPEATED_SHARE), turn


def assert_no_error(url: str) -> None:
    """No request failed. Codex leaves with the last event, sometimes before the stream has ended."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    outcomes = {found[1] for line in lines if (found := re.match(r'rekindle_requests_total\{outcome="(\w+)"', line))}
    assert "stop" in outcomes and outcomes <= {"stop", "disconnected"}, outcomes
