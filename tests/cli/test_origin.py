"""`rekindle origin`, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.codec.cipher import read_secret
from rekindle.core.kv import Span
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote.client import Origin
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.signing import SigningKey, read_public
from rekindle.session.prompt import encode_prompt
from rekindle.session.publish import beginnings, computed, levels_of
from tests.cli.test_commands import rekindle
from tests.lora import fake_pairs, save_lora
from tests.remote.places import fetch_all, find, same_bits
from tests.server.soak import tiny_embedder

TEXT = "Light the lamp at dusk. Write the hour into the book. Put it out at dawn. " * 5


def ok(*arguments: object) -> str:
    result = rekindle(*map(str, arguments))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def error(*arguments: object) -> str:
    result = rekindle(*map(str, arguments))
    assert result.exit_code == 1
    return str(result.exception)


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    path = tmp_path / "manual.txt"
    path.write_text(TEXT, "utf-8")
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with a key and a secret."""
    ok("origin", "key", tmp_path / "key")
    ok("origin", "key", "--secret", tmp_path / "secret")
    return tmp_path


def test_keys_are_made_and_told(tmp_path: Path) -> None:
    told = ok("origin", "key", tmp_path / "key")
    assert read_public(str(tmp_path / "key.pub")) in told
    assert f"signing key {SigningKey.read(tmp_path / 'key').name[:8]}" in told  # as `origin ls` shows it
    assert "already exists" in error("origin", "key", tmp_path / "key")
    assert "a new secret" in ok("origin", "key", "--secret", tmp_path / "secret")
    for name in ("key", "secret"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_is_published_is_listed_served_found_and_removed(
    encrypted: bool, tiny_folder: Path, manual: Path, keys: Path, one_thread: None
) -> None:
    folder, how = keys / "origin", ["--key", keys / "key", *(["--secret", keys / "secret"] if encrypted else [])]
    publish = ["origin", "publish", tiny_folder, "--to", folder, "--file", manual, *how]
    (first,) = json.loads(ok(*publish, "--levels", "raw,quantized", "--json"))
    assert first["tokens"] > 300 and [level["name"] for level in first["levels"]] == ["raw", "quantized"]
    assert all(level["new"] for level in first["levels"])
    again = ok(*publish, "--levels", "quantized,q4")
    assert again.count("already published") == 2 and "q4" in again and first["context"][:8] in again
    (listed,) = json.loads(ok("origin", "ls", folder, "--json"))
    assert listed["encrypted"] == encrypted and listed["tokens"] == (None if encrypted else first["tokens"])
    told = ok("origin", "ls", folder, *(["--secret", keys / "secret"] if encrypted else []))
    assert (
        "tiny" in told and SigningKey.read(keys / "key").name[:8] in told and "raw, quantized" in told and "q4" in told
    )
    secret = read_secret(keys / "secret") if encrypted else None
    messages = [{"role": "user", "content": TEXT}]
    with (
        _serving(folder) as url,
        Session(tiny_folder, cache="off") as session,
        computed(session, Request.of(messages)) as source,
    ):
        origin = Origin(url, [read_public(str(keys / "key.pub"))], secret=secret)
        found = find(origin, source.tokens, source.model)
        assert found is not None and found.tokens == first["tokens"] == len(source.tokens)
        for cell, kv in fetch_all(origin, found).items():
            span = found.span(cell.chunk)
            assert same_bits(kv, source.export(_whole(source.tokens)).layers[cell.layer], span)
        origin.close()
    assert "removed" in ok("origin", "rm", folder, first["context"][:6])
    assert json.loads(ok("origin", "ls", folder, "--json")) == []
    assert ok("origin", "ls", folder) == f"Nothing is published in {folder}.\n"
    assert "no context begins" in error("origin", "rm", folder, first["context"][:6])


def test_kv_that_is_in_the_cache_is_not_computed_again_and_quantized_kv_is_never_published_as_exact(
    tiny_folder: Path, manual: Path, keys: Path, tmp_path: Path, one_thread: None
) -> None:
    """A cache that holds quantized KV of the prompt: what is published is computed all the same."""
    cache = str(tmp_path / "cache")
    with Session(tiny_folder, cache=cache, reuse="quantized", codec="q3") as session:
        session.generate(TEXT, max_tokens=1)
    with Session(tiny_folder, cache=cache, reuse="quantized", codec="q3") as session:
        assert session.generate(TEXT, max_tokens=1).reuse.quantized > 0
        with computed(session, Request.of(TEXT)) as source:
            mine = source.export(_whole(source.tokens)).layers
    with Session(tiny_folder, cache="off") as fresh, computed(fresh, Request.of(TEXT)) as source:
        theirs = source.export(_whole(source.tokens)).layers
        assert all(same_bits(a, b, _whole(source.tokens)) for a, b in zip(mine, theirs, strict=True))
    with Session(tiny_folder, cache=cache) as session:
        session.warm(TEXT)
    with (
        Session(tiny_folder, cache=cache) as session,
        computed(session, Request.of(TEXT)) as source,
        session.cache.peek(Request.of(TEXT), source.tokens) as prefill,
    ):
        assert prefill.lookup.matches.length >= len(source.tokens) - 1


def test_what_cannot_be_published_is_said(tiny_folder: Path, manual: Path, keys: Path) -> None:
    base = ["origin", "publish", tiny_folder, "--to", keys / "origin", "--key", keys / "key"]
    assert "Give a prompt" in error(*base)
    assert "tokens, too few to publish. Give at least 128" in error(*base, "short")
    assert "no level 'q9'" in error(*base, "--file", manual, "--levels", "q9")
    assert "levels" in error(*base, "--file", manual, "--levels", ",")
    assert "not a signing key" in error(*base[:-1], keys / "secret", "--file", manual)
    assert "is not a secret" in error(*base, "--file", manual, "--secret", keys / "key")
    assert "not the folder of an origin" in error("origin", "ls", manual.parent / "nothing")
    assert "no token" in error("origin", "serve", keys / "origin", "--host", "0.0.0.0")
    (keys / "tokens").write_text("# none\n", "utf-8")
    (keys / "tokens").chmod(0o600)
    assert "has no token in it" in error("origin", "serve", keys / "origin", "--token-file", keys / "tokens")


def test_what_questions_begin_with_is_published_and_found_by_another_question(tmp_path: Path) -> None:
    embedder, key = tiny_embedder(tmp_path / "embedder"), SigningKey.new()
    engine = FakeEngine(context_tokens=4000)
    with Session(engine, cache=tmp_path / "cache", embedder=embedder) as session:
        session.ingest(documents=["Boats leave Vesk on Tuesdays. The ferry to Ormund costs eleven crowns. " * 3])
        session.ask("What does the ferry cost?", top_k=1, max_tokens=1)
        session.flush()
        head, passage = beginnings(session, 8)
        assert not head.quotes and len(passage.quotes) == 1
        publisher = Publisher(tmp_path / "origin", key)
        for request in (head, passage):
            with computed(session, request) as source:
                publisher.publish(source, levels_of("quantized", session))
        other = session.prepare("When do boats leave?", top_k=1).request
        with computed(session, other) as source, _serving(tmp_path / "origin") as url:
            origin = Origin(url, [key.public])
            found = find(origin, source.tokens, source.model)
            quoted = encode_prompt(session.engine, other).quoted[0].span
            assert found is not None and found.tokens > quoted.start + 128  # well into the passage
            origin.close()


def test_an_engine_whose_kv_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    with Session(engine, cache="off") as session:
        engine.capabilities = replace(engine.capabilities, opaque="its layers are recurrent")
        with pytest.raises(InvalidSetting, match="its layers are recurrent"), computed(session, Request.of(TEXT)):
            pass


def test_kv_of_an_adapter_is_found_with_the_adapter_alone(tmp_path: Path) -> None:
    engine, key = FakeEngine(), SigningKey.new()
    with Session(engine, cache="off") as session:
        session.adapters.load("other", str(save_lora(tmp_path / "lora", fake_pairs(1))))
        with computed(session, Request.of(TEXT, adapter="other")) as source:
            Publisher(tmp_path / "origin", key).publish(source, levels_of("raw", session))
        with _serving(tmp_path / "origin") as url:
            origin = Origin(url, [key.public])
            assert source.model.adapter is not None
            assert find(origin, source.tokens, source.model) is not None
            assert find(origin, source.tokens, replace(source.model, adapter=None)) is None
            origin.close()


def _whole(tokens: tuple[int, ...]) -> Span:
    return Span(0, len(tokens))


class _serving:
    """`rekindle origin serve` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "rekindle", "origin", "serve", str(folder), "--port", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "500"})

    def __enter__(self) -> str:
        assert self._process.stderr is not None
        line = self._process.stderr.readline().decode()
        assert " at http://" in line, line
        return line.rsplit(" at ", 1)[1].strip()

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)
