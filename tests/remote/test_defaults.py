"""Defaults of publishers and clients meet: the commands of the guide work as written, and what does not fit is said."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache import cost
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.remote import remote_kv as streams
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey
from rekindle.session.publish import computed, levels_of
from tests.cli.test_origin import ok
from tests.docs.pages import ROOT

TEXT = "Light the lamp at dusk. Write the hour into the book. Put it out at dawn. " * 5
GUIDE = (ROOT / "docs/guide/origin.md").read_text("utf-8")
SERVED_AT = "http://127.0.0.1:8378"


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are small: as if their prompts were worth streaming."""
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 1.0, 0.0)))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with OriginServer(folder, OriginSettings(port=0)).running() as url:
        yield url


def command(begins: str, model: Path, url: str = SERVED_AT) -> list[str]:
    """A command of the guide, word by word, for a tiny model and a free port."""
    line = next(line for line in GUIDE.splitlines() if line.startswith(begins) and "manual.txt" in line)
    words = [str(model) if word == "smollm2" else word for word in shlex.split(line, comments=True)[1:]]
    return [url if word.startswith("http") else word for word in words]


@pytest.fixture
def pair(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[str]:
    """What the guide publishes, served; the client's cache is empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manual.txt").write_text(TEXT, "utf-8")
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache-there"))
    ok("origin", "key", "publisher")
    said = ok(*command("rekindle origin publish", tiny_folder))
    assert "raw" in said and "quantized" in said
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache-here"))
    assert command("rekindle run", tiny_folder) != command("rekindle run", tiny_folder, "elsewhere")
    with serving(Path("origin")) as url:
        yield url


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("reuse", ["exact", "quantized"])
def test_what_the_guide_publishes_comes_to_who_asks_as_the_guide_does(
    pair: str, tiny_folder: Path, reuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reuse != "exact":  # the default
        monkeypatch.setenv("REKINDLE_REUSE", reuse)
    reply = json.loads(ok(*command("rekindle run", tiny_folder, pair), "-n", "2", "--json"))
    assert reply["reuse"]["streamed"] > 0 and reply["reuse"]["origin_miss"] is None
    assert reply["reuse"]["level"] == reuse


def test_check_says_a_line_each(pair: str, tiny_folder: Path) -> None:
    asked = command("rekindle origin check", tiny_folder, pair)
    lines = ok(*asked).splitlines()
    assert [line.split()[0] for line in lines] == ["origin", "key", "model", "levels", "contexts", "prompt"]
    assert f"{pair} answers" in lines[0] and "matches" in lines[2] and "raw, quantized (KL 0." in lines[3]
    assert re.search(r"\b\d+ tokens, raw, [\d.]+ [kM]B", lines[-1])
    quantized = ok(*asked, "--reuse", "quantized").splitlines()[-1]
    assert re.search(r"\b\d+ tokens, q[34], ", quantized)
    assert "it has contexts for this model" in ok(*asked, "--system", "Be brief.").splitlines()[-1]
    *_, last = ok(*asked, "--origin-keys", SigningKey.new().public).splitlines()[:2]
    assert last.startswith("key ") and "which you did not name" in last
    short = json.loads(ok(*asked[: asked.index("--file")], "--json"))
    assert list(short) == ["origin", "key", "model", "levels", "contexts"]
    assert "1 context for this model" in short["contexts"]


def test_check_says_why_nothing_is_there(pair: str, tiny_folder: Path, tmp_path: Path) -> None:
    asked = command("rekindle origin check", tiny_folder, pair)
    other = ok(*asked, "--dtype", "bfloat16").splitlines()
    assert "another dtype, device or engine: only quantized KV fits" in other[2] and " it has" in other[-1]
    near = [*asked, "--dtype", "bfloat16", "--reuse", "quantized"]
    assert re.search(r"tokens, q[34], ", ok(*near).splitlines()[-1])
    assert "it has this prompt only in levels" in ok(*near, "--kl-budget", "0").splitlines()[-1]
    ok("origin", "key", "--secret", "secret")
    assert "nothing is there for this model" in ok(*asked, "--origin-secret", "secret")
    gone = ok(*command("rekindle origin check", tiny_folder, "http://127.0.0.1:9")).splitlines()
    assert len(gone) == 1 and gone[0].startswith("origin ")


class Rounded(FakeEngine):
    """A fake whose identity is that of another dtype: what it computes is not what the other computes."""

    device = "gpu"


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize(("levels", "miss"), [("raw", "dtype"), ("raw,quantized", "dtype"), ("quantized", "level")])
def test_a_reply_an_explanation_and_a_summary_say_what_does_not_fit(levels: str, miss: str, tmp_path: Path) -> None:
    key = SigningKey.new()
    with Session(Rounded(), cache="off") as session, computed(session, Request.of(TEXT)) as source:
        Publisher(tmp_path / "files", key).publish(source, levels_of(levels, session))
    own: dict[str, Any] = {"origin_keys": key.public}
    with serving(tmp_path / "files") as url:
        with Session(FakeEngine(), cache=tmp_path / "exact", origin=url, **own) as session:
            explained = session.explain(TEXT)
            reply = session.generate(TEXT, max_tokens=2)
            assert reply.reuse.origin_miss == miss and "; origin: it has" in str(reply.reuse)
            assert explained.origin is not None and explained.origin.miss == miss
            assert "origin: it has" in str(explained)
        with Session(FakeEngine(), cache=tmp_path / "quantized", origin=url, reuse="quantized", **own) as session:
            explained, reply = session.explain(TEXT), session.generate(TEXT, max_tokens=2)
            came = "quantized" in levels
            assert (reply.reuse.streamed > 0) == came and reply.reuse.origin_miss == (None if came else "dtype")
            assert explained.origin is not None and explained.origin.level == ("quantized" if came else None)


def test_a_prompt_that_is_computed_sooner_than_asked_for_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WORTH_SECONDS", 1e9)
    own: dict[str, Any] = {"origin": "http://127.0.0.1:9", "origin_keys": SigningKey.new().public}
    with Session(FakeEngine(), cache=tmp_path / "cache", **own) as session:
        assert session.generate(TEXT, max_tokens=2).reuse.origin_miss == "quick"
        assert session.generate("short", max_tokens=2).reuse.origin_miss is None
