"""Who asks under one tenant and salt learns nothing of what was asked under another: neither what nor whether.

Two servers: on one of them somebody did everything there is before, on the other nobody ever did. Whoever comes next
asks both of them the same and is told the same. Only what belongs to the moment is left out: times, random names, how
fast the machine is. What the whole machine has in common (its load, the room on its disk) is not looked at here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny embedder

from rekindle import Session
from rekindle.cache import context
from rekindle.cache import stored_kv as cache
from rekindle.core.request import Message
from rekindle.engine.fake import START, ByteTokenizer
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.server.auth import ApiKeys
from rekindle.server.routes import ENDPOINTS
from rekindle.text.base import ReplayedChat, Written
from tests.server.serving import ADMIN, ALICE, BOB, Gated, Served, fake_session, serving
from tests.server.soak import tiny_embedder
from tests.unmeasured_costs import UnmeasuredCosts

OWN = "/v1/rekindle"
LAMP = "The lamp of the lighthouse is lit at dusk by the keeper, who carries the oil up two hundred steps."
MESSAGES = [{"role": "user", "content": f"{LAMP} Who lights it?"}]
SAID = [*MESSAGES, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Are you sure of that?"}]
GREEDY = {"temperature": 0, "max_tokens": 4}
OPTIONS = {**GREEDY, "app_id": "mail"}
OLLAMA_OPTIONS = {"temperature": 0, "num_predict": 4}


class TwoSpellings(ByteTokenizer):
    """Where a reply is not known as it was written, it takes a token more."""

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return self.encode_replayed(messages, {}, **options).tokens

    def encode_replayed(self, messages: Sequence[Message], written: Written, **options: Any) -> ReplayedChat:
        spelled = sum(m.role == "assistant" and at not in written for at, m in enumerate(messages))
        return ReplayedChat([*[START] * spelled, *super().encode_chat(messages, **options)], len(written))


class Speller(Gated):
    """An engine with that tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = TwoSpellings()


@dataclass
class Party:
    """Somebody who asks, with a key and a salt or without."""

    served: Served
    key: str | None = None
    salt: str | None = None
    found: dict[str, str] = field(default_factory=dict)  # names of things, from earlier answers

    def ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """What is answered: the status, and what is told, without what belongs to the moment."""
        query = {}
        if self.salt is not None and body is not None:
            body = {**body, "cache_salt": self.salt}
        elif self.salt is not None:
            query = {"cache_salt": self.salt}
        with self.served.http(self.key) as client:
            answer = client.request(method, path, json=body, params=query)
        self.settle()
        self._remember(path, answer.text)
        told = _lasting(_parsed(answer.text))
        return answer.status_code, (told, _without_hex(answer.headers.get("X-Rekindle-Plan", "")))

    def settle(self) -> None:
        """Wait until all that came of it is noted: else it would be noted at some time."""
        session = self.served.session
        assert session.flush() and session.cache.store is not None
        session.cache.store.maintain()

    def _remember(self, path: str, text: str) -> None:
        if path in (f"{OWN}/entries", f"{OWN}/documents") and '"data"' in text and (rows := json.loads(text)["data"]):
            deepest = max(rows, key=lambda row: (row.get("tokens", 0), row.get("depth", 0)))
            self.found[path.rsplit("/", 1)[1]] = deepest["name"]

    def named(self, what: str) -> str:
        return self.found.get(what, "0" * 16)


Probe = tuple[str, str, Callable[[Party], tuple[str, dict[str, Any] | None]]]


def probe(
    method: str, template: str, body: dict[str, Any] | None = None, **names: str | Callable[[Party], str]
) -> Probe:
    """A call of an endpoint; `names` stand in its path."""

    def made(party: Party) -> tuple[str, dict[str, Any] | None]:
        path = template
        for name, value in names.items():
            path = re.sub(rf"{{{name}(:\w+)?}}", value if isinstance(value, str) else value(party), path)
        return path, body

    return method, template, made


ENTRY, DOCUMENT = (lambda party: party.named("entries")), (lambda party: party.named("documents"))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PIN, LIVE = f"{OWN}/entries/{{name}}/pin", f"{OWN}/live"
PROBES: tuple[Probe, ...] = (
    probe("GET", f"{OWN}/explain/last"),
    probe("POST", f"{OWN}/explain", {"messages": MESSAGES}),
    probe("POST", f"{OWN}/explain", {"messages": [{"role": "user", "content": LAMP}]}),
    probe("POST", f"{OWN}/explain", {"messages": SAID}),
    probe("POST", CHAT, {"messages": SAID, **OPTIONS}),
    probe("POST", CHAT, {"messages": MESSAGES, **OPTIONS, "grammar": 'root ::= "yes"'}),
    probe("POST", CHAT, {"messages": SAID, **OPTIONS}),
    probe("POST", CHAT, {"messages": MESSAGES, **OPTIONS, "stream": True}),
    probe("POST", CHAT, {"messages": [], **OPTIONS}),
    probe("POST", f"{OWN}/explain", {"messages": MESSAGES}),
    probe("GET", f"{OWN}/explain/last"),
    probe("POST", COMPLETIONS, {"prompt": LAMP, **GREEDY}),
    probe("POST", "/v1/responses", {"input": SAID, "max_output_tokens": 4, "temperature": 0}),
    probe("POST", "/v1/responses/input_tokens", {"input": SAID}),
    probe("POST", "/v1/messages", {"messages": SAID, "max_tokens": 4, "temperature": 0}),
    probe("POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}),
    probe("POST", "/v1/messages/count_tokens", {"messages": SAID}),
    probe("POST", "/v1/embeddings", {"input": [LAMP]}),
    probe("POST", "/api/chat", {"messages": SAID, "options": OLLAMA_OPTIONS}),
    probe("POST", "/api/chat", {"messages": MESSAGES, "options": OLLAMA_OPTIONS, "stream": False}),
    probe("POST", "/api/generate", {"prompt": LAMP, "options": OLLAMA_OPTIONS}),
    probe("POST", "/api/embed", {"input": [LAMP]}),
    probe("POST", "/api/embeddings", {"prompt": LAMP}),
    probe("GET", "/api/tags"),
    probe("POST", "/api/show", {"model": "fake-0"}),
    probe("GET", "/api/ps"),
    probe("GET", "/api/version"),
    probe("POST", "/api/pull", {"model": "no-such-model"}),
    probe("DELETE", "/api/delete", {"model": "no-such-model"}),
    probe("POST", "/completion", {"prompt": LAMP, "temperature": 0, "n_predict": 4}),
    probe("POST", "/infill", {"input_prefix": LAMP, "input_suffix": "?"}),
    probe("GET", "/props"),
    probe("GET", "/slots"),
    probe("POST", "/apply-template", {"messages": SAID}),
    probe("GET", "/v1/models"),
    probe("GET", "/v1/models/{name:path}", name="fake-0"),
    probe("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    probe("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    probe("POST", "/tokenize", {"messages": SAID}),
    probe("POST", "/detokenize", {"tokens": [65]}),
    probe("GET", "/"),
    probe("GET", "/health"),
    probe("POST", f"{OWN}/ask", {"question": "Who lights the lamp?", **OPTIONS}),
    probe("POST", f"{OWN}/search", {"query": "Who lights the lamp?"}),
    probe("GET", f"{OWN}/documents"),
    probe("POST", f"{OWN}/documents", {"documents": [{"text": LAMP, "source": "lamp"}], "app_id": "mail"}),
    probe("GET", f"{OWN}/documents"),
    probe("GET", f"{OWN}/documents/{{name}}", name=DOCUMENT),
    probe("GET", f"{OWN}/library"),
    probe("POST", f"{OWN}/library/check", {"acknowledge": True}),
    probe("POST", f"{OWN}/search", {"query": "Who lights the lamp?"}),
    probe("POST", f"{OWN}/ask", {"question": "Who lights the lamp?", **OPTIONS}),
    probe("POST", f"{OWN}/ask", {"question": "Who lights the lamp?", **OPTIONS}),
    probe("POST", f"{OWN}/warm", {"messages": [{"role": "user", "content": f"{LAMP} Why?"}]}),
    probe("GET", f"{OWN}/stats"),
    probe("GET", f"{OWN}/entries"),
    probe("PUT", PIN, name=ENTRY),
    probe("GET", f"{OWN}/entries"),
    probe("DELETE", PIN, name=ENTRY),
    probe("DELETE", f"{OWN}/entries/{{name}}", name=ENTRY),
    probe("DELETE", f"{OWN}/documents/{{name}}", name=DOCUMENT),
    probe("GET", f"{OWN}/apps"),
    probe("PUT", f"{OWN}/apps/{{id}}", {"state": "killed"}, id="mail"),
    probe("GET", f"{OWN}/apps"),
    probe("GET", f"{OWN}/server"),
    probe("GET", LIVE),
    probe("GET", f"{OWN}/requests/{{id}}", id="1"),
    probe("GET", f"{OWN}/map"),
    probe("GET", f"{OWN}/usage"),
    probe("POST", f"{OWN}/check", {"fix": False}),
    probe("GET", "/metrics"),
)
PAGE = {LIVE, f"{OWN}/requests/{{id}}", f"{OWN}/map", f"{OWN}/usage"}
OF_THE_MACHINE = {f"{OWN}/check", f"{OWN}/library", "/metrics", *PAGE}  # told to operators about everybody


def test_every_endpoint_is_probed() -> None:
    """A new one is told here: add what somebody would ask of it to `PROBES`."""
    assert {(method, template) for method, template, _ in PROBES} == {(e.method, e.path) for e in ENDPOINTS}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def start(tmp_path: Path, embedder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Start a server that nobody asked anything yet."""
    for name in ("LOOKUP_SECONDS", "LOAD_SECONDS"):
        monkeypatch.setattr(cache, name, 60.0)  # a machine that is busy finds what it has all the same
    monkeypatch.setattr(context, "_MAX_PARKED", 1000)  # what everybody shares is not what is looked at
    with ExitStack() as stack:

        def started(name: str, keys: ApiKeys) -> Served:
            settings = {"embedder": embedder, "keep_reply_tokens": True, "answers": "verified"}
            session = fake_session(tmp_path / name, Speller(), **settings)
            session.cache.kv.costs = UnmeasuredCosts()
            return stack.enter_context(serving(session, keys=keys))

        yield started


def asked(party: Party, operator: bool) -> list[tuple[str, Any]]:
    """Everything there is, in order, and what was told."""
    answers = []
    for method, template, make in PROBES:
        endless = template == LIVE and party.key == ADMIN
        if not endless and not (operator and template in OF_THE_MACHINE):
            path, body = make(party)
            answers.append((f"{method} {path} {json.dumps(body)}", party.ask(method, path, body)))
    return answers


def work_ahead(session: Session, tenant: str, salt: str | None) -> None:
    """What is done for somebody while nobody asks."""
    options = IdleOptions(stride=1, settle_seconds=0.0, max_tokens=4)
    session.ingest(documents=[LAMP], tenant=tenant, cache_salt=salt)
    Idle(session, options, tenant, salt).run()
    assert session.flush()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((ALICE, None), (BOB, None), id="tenants"),
        pytest.param((ALICE, "one"), (BOB, "one"), id="tenants with the same salt"),
        pytest.param((ALICE, "one"), (ALICE, "other"), id="salts"),
        pytest.param((ALICE, "one"), (ALICE, None), id="a salt and none"),
        pytest.param((ADMIN, None), (BOB, None), id="an operator and a tenant"),
        pytest.param((None, "one"), (None, "other"), id="salts of a server without keys"),
    ],
)
def test_what_is_told_does_not_depend_on_what_others_did(
    start: Callable[..., Served], one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    operator = other[0] is None
    keys = ApiKeys() if operator else ApiKeys([f"alice={ALICE}", f"bob={BOB}"], [ADMIN])
    busy, quiet = start("busy", keys), start("quiet", keys)
    asked(Party(busy, *one), operator)
    tenant = {ALICE: "alice", ADMIN: "local", None: "local"}[one[0]]
    work_ahead(busy.session, tenant, one[1])
    alone = asked(Party(quiet, *other), operator)
    for (label, told), (_, expected) in zip(asked(Party(busy, *other), operator), alone, strict=True):
        assert told == expected, label


def test_a_name_of_another_is_as_unknown_as_any(start: Callable[..., Served]) -> None:
    """Entries and documents by the names that they have for others, and apps that others called so."""
    busy = start("busy", ApiKeys([f"alice={ALICE}"], [ADMIN]))
    owner, stranger = Party(busy, ALICE, "one"), Party(busy, ALICE, "other")
    owner.ask("POST", CHAT, {"messages": MESSAGES, **OPTIONS})
    owner.ask("POST", f"{OWN}/documents", {"documents": [LAMP]})
    for path in (f"{OWN}/entries", f"{OWN}/documents"):
        owner.ask("GET", path, None)
    entry, document = owner.found["entries"], owner.found["documents"]
    before = [owner.ask("GET", f"{OWN}/{what}", None) for what in ("entries", "documents", "apps")]
    for method, path in (
        ("PUT", f"{OWN}/entries/{entry}/pin"),
        ("DELETE", f"{OWN}/entries/{entry}"),
        ("GET", f"{OWN}/documents/{document}"),
        ("DELETE", f"{OWN}/documents/{document}"),
    ):
        assert stranger.ask(method, path, None)[0] == 404, path
    assert stranger.ask("PUT", f"{OWN}/apps/mail", {"state": "killed"})[0] == 200
    assert [owner.ask("GET", f"{OWN}/{what}", None) for what in ("entries", "documents", "apps")] == before


_MOMENT = re.compile(r"(_ms|_seconds|_per_second|_duration)$")
_MOMENTS = {
    "created",
    "created_at",
    "completed_at",
    "modified_at",
    "at",
    "seen",
    "kept",
    "used",
    "made",
    "added",
    "ms",
    "timeline",
}
_RANDOM = re.compile(
    r"\b[0-9a-f]{16}\b|(?<=entry )[0-9a-f]{8}\b|(?<=cmpl-)\w+|(?<=answer-)\w+|(?<=msg_)\w+|(?<=resp_)\w+"
)
_TIMED_LINE = re.compile(r"^  (first token|expected|without the cache).*\n", re.MULTILINE)


def _parsed(text: str) -> Any:
    """JSON, the events of a stream, or the lines of metrics that count something."""
    lines = text.splitlines()
    if text.startswith("{"):
        return [json.loads(line) for line in lines]
    if any(line.startswith("data: ") for line in lines):
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [line for line in lines if not re.search(r"^#|_bucket|_sum|saved_seconds", line)]


def _without_hex(text: str) -> str:
    return _RANDOM.sub("*", text)


def _lasting(told: Any) -> Any:
    """What was told, without what belongs to the moment; entries in an order that does not hang on random names."""
    if isinstance(told, dict):
        return {k: _lasting(v) for k, v in told.items() if k not in _MOMENTS and not _MOMENT.search(k)}
    if isinstance(told, list):
        items = [_lasting(item) for item in told]
        entries = items and isinstance(items[0], dict) and "saved_ms" in told[0]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True)) if entries else items
    return _without_hex(_TIMED_LINE.sub("", told)) if isinstance(told, str) else told
