"""Random requests for as long as one likes: what the soak sends, and what must come of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rekindle.session.session import Session

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = ("sk-alice-0000", "sk-bob-000000", "sk-admin-0000")
DOOMED = "doomed"  # the app that is killed now and then
_CLEAR = 1e-3  # tokens that are not likelier than others by that much may change with the company
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"far": {"type": "boolean"}}}}}
_GRAMMARS: Sequence[dict[str, Any]] = (
    {"grammar": 'root ::= "yes" | "no"'},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}},
)


def tiny_embedder(folder: Path) -> str:
    """A folder with an embedder of random weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    from tests.engine.embedding.tiny_encoders import SIZES, word_tokenizer

    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model("bert", **SIZES)).save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)


@dataclass(frozen=True)
class Known:
    """A prompt and the only right reply to it."""

    prompt: str | list[dict[str, str]]
    max_tokens: int
    text: str

    @property
    def path(self) -> str:
        return COMPLETIONS if isinstance(self.prompt, str) else CHAT

    @property
    def body(self) -> dict[str, Any]:
        name = "prompt" if isinstance(self.prompt, str) else "messages"
        return {name: self.prompt, "max_tokens": self.max_tokens, "temperature": 0}


def known_replies(session: Session, count: int, words: int, rng: random.Random) -> list[Known]:
    """Prompts of many lengths, some of which begin alike, and what the model alone says to them."""
    shared = " ".join(f"rule {number}" for number in range(words))
    found: list[Known] = []
    while len(found) < count:
        own = " ".join(rng.choice(("tea", "cup", "pot", "leaf")) for _ in range(rng.randrange(1, words)))
        text = shared + own if rng.random() < 0.5 else own
        prompt: Any = text if rng.random() < 0.5 else [{"role": "user", "content": text}]
        tokens = rng.randrange(1, 24)
        reply = session.stream(prompt, max_tokens=tokens, logprobs=2).reply
        if all(one.top[0].logprob - one.top[1].logprob > _CLEAR for one in reply.logprobs):
            found.append(Known(prompt, tokens, reply.text))
    return found


@dataclass
class Soak:
    """Clients that ask at random until they are told to stop. `wrong` is what must be empty at the end."""

    url: str
    known: Sequence[Known]
    embeds: bool
    seed: int
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds: float, clients: int = 6) -> None:
        """So many clients for so long."""
        self.stop.clear()
        threads = [
            threading.Thread(target=self._client, args=(random.Random(self.seed * 1000 + number),), daemon=True)
            for number in range(clients)
        ]
        self.seed += 1
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join()

    def _client(self, rng: random.Random) -> None:
        acts: list[tuple[Callable[[random.Random], None], int]] = [
            (self._whole, 20), (self._streamed, 20), (self._leave, 30), (self._constrained, 6), (self._several, 6),
            (self._admin, 12), (self._bad, 6), (self._embed, 4 if self.embeds else 0), (self._crowd, 1),
            (self._kill, 2),
        ]  # fmt: skip
        while not self.stop.is_set():
            act = rng.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
            try:
                act(rng)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
            if len(self.wrong) > 20:
                self.stop.set()

    def _ask(self, method: str, path: str, body: object = None, key: str = KEYS[0]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        try:
            content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, content, {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            read = answer.read()
        finally:
            connection.close()
        self.counts[f"{answer.status}"] += 1
        return answer.status, read

    def _expect(self, what: str, status: int, body: bytes, *allowed: int) -> bool:
        """Whether it was answered; 429 always may be the answer."""
        if status not in (200, 429, *allowed):
            self.wrong.append(f"{what}: {status} {body[:300]!r}")
        return status == 200

    def _some(self, rng: random.Random) -> tuple[Known, dict[str, Any], str]:
        known = rng.choice(self.known)
        apps: dict[str, Any] = {"app_id": f"app-{rng.randrange(2000)}"} if rng.random() < 0.5 else {}
        if rng.random() < 0.3:
            apps["app_state"] = rng.choice(("foreground", "background"))
        if rng.random() < 0.3:
            apps["cache_salt"] = f"salt-{rng.randrange(400)}"
        if rng.random() < 0.1:
            apps["cache_prompt"] = False
        return known, {**known.body, **apps}, rng.choice(KEYS)

    def _whole(self, rng: random.Random) -> None:
        known, body, key = self._some(rng)
        if self._expect("whole", *self._ask_text(known, body, key)):
            self.counts["compared"] += 1

    def _ask_text(self, known: Known, body: dict[str, Any], key: str) -> tuple[int, bytes]:
        status, read = self._ask("POST", known.path, body, key)
        if status == 200:
            choice = json.loads(read)["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if text != known.text:
                self.wrong.append(f"other text: {text!r} instead of {known.text!r} for {body}")
        return status, read

    def _streamed(self, rng: random.Random) -> None:
        known, body, key = self._some(rng)
        status, read = self._ask("POST", known.path, {**body, "stream": True}, key)
        if not self._expect("streamed", status, read):
            return
        events = [line[6:] for line in read.decode().split("\n") if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            self.wrong.append(f"a stream without end: {events[-1]}")
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        text = "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)
        if text != known.text:
            self.wrong.append(f"other text streamed: {text!r} instead of {known.text!r} for {body}")
        self.counts["compared"] += 1

    def _leave(self, rng: random.Random) -> None:
        """Close the socket at some moment: before the request is whole, while it waits, or amid the reply."""
        known, body, key = self._some(rng)
        asked = {**body, "stream": rng.random() < 0.7, "max_tokens": 64, "n": rng.choice((1, 1, 3))}
        content = json.dumps(asked).encode()
        lines = f"POST {known.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        sent = f"{lines}Content-Length: {len(content)}\r\n\r\n".encode() + content
        place = urlsplit(self.url)
        with socket.create_connection((place.hostname, place.port), timeout=120) as connection:
            connection.sendall(sent if rng.random() < 0.9 else sent[: rng.randrange(len(sent))])
            if rng.random() < 0.5:
                connection.settimeout(rng.choice((0.001, 0.01, 0.05, 0.2)))
                with contextlib.suppress(TimeoutError):
                    connection.recv(rng.choice((1, 100, 1000, 5000)))
            if rng.random() < 0.3:  # without a word of goodbye
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.counts["left"] += 1

    def _constrained(self, rng: random.Random) -> None:
        known, body, key = self._some(rng)
        rules: dict[str, Any] = dict(rng.choice(_GRAMMARS))
        if known.path == CHAT and rng.random() < 0.3:
            rules = {"tools": [_TOOL], "tool_choice": rng.choice(("auto", "required", "none"))}
        more = {"stop": ["e", "no end"], "temperature": 1, "seed": rng.randrange(9), "stream": rng.random() < 0.5}
        self._expect("constrained", *self._ask("POST", known.path, {**body, **rules, **more}, key))

    def _several(self, rng: random.Random) -> None:
        texts = [known.prompt for known in rng.sample(list(self.known), 8) if isinstance(known.prompt, str)]
        body = {"prompt": texts or "x", "n": rng.randrange(1, 3), "max_tokens": 4, "logprobs": rng.choice((None, 3))}
        self._expect("several", *self._ask("POST", COMPLETIONS, body, rng.choice(KEYS)))

    def _admin(self, rng: random.Random) -> None:
        own, key = "/v1/rekindle", rng.choice(KEYS)
        path = rng.choice(("/health", "/metrics", "/v1/models", f"{own}/stats", f"{own}/apps", f"{own}/server"))
        self._expect(path, *self._ask("GET", path, None, key))
        known = rng.choice(self.known)
        name = "prompt" if isinstance(known.prompt, str) else "messages"
        for way in rng.sample(("explain", "warm"), 1):
            self._expect(way, *self._ask("POST", f"{own}/{way}", {name: known.prompt}, key))
        self._expect("last", *self._ask("GET", f"{own}/explain/last", None, key), 404)
        self._expect("tokens", *self._ask("POST", "/tokenize", {"content": "tea " * rng.randrange(1, 99)}, key))
        status, read = self._ask("GET", f"{own}/entries?limit=5", None, key)
        if self._expect("entries", status, read) and (data := json.loads(read)["data"]):
            entry = rng.choice(data)["name"]
            for method, where in (("PUT", f"/{entry}/pin"), ("DELETE", f"/{entry}/pin"), ("DELETE", f"/{entry}")):
                self._expect(method, *self._ask(method, f"{own}/entries{where}", None, key), 404)
        if rng.random() < 0.1:
            self._expect("check", *self._ask("POST", f"{own}/check", {}, KEYS[2]))

    def _bad(self, rng: random.Random) -> None:
        bodies = [b"{", b"[" * 5000, b'{"messages": []}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
                  json.dumps({"prompt": "x" * 100_000}).encode(), b"\xff"]  # fmt: skip
        status, read = self._ask("POST", rng.choice((CHAT, COMPLETIONS)), rng.choice(bodies), rng.choice(KEYS))
        if status not in (400, 429):
            self.wrong.append(f"bad: {status} {read[:300]!r}")
        status, read = self._ask("GET", "/v1/models", None, "sk-nobody-000")
        if status != 401:
            self.wrong.append(f"nobody: {status} {read[:300]!r}")

    def _embed(self, rng: random.Random) -> None:
        body = {"input": ["tea " * rng.randrange(1, 20)] * rng.randrange(1, 8)}
        self._expect("embed", *self._ask("POST", "/v1/embeddings", body, rng.choice(KEYS)))

    def _crowd(self, rng: random.Random) -> None:
        """More at once than the line takes."""
        threads = [threading.Thread(target=self._whole, args=(random.Random(rng.random()),)) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _kill(self, rng: random.Random) -> None:
        known = rng.choice(self.known)
        body = {**known.body, "max_tokens": 64, "app_id": DOOMED}
        dying = threading.Thread(target=lambda: self._expect("killed", *self._ask("POST", known.path, body), 503))
        dying.start()
        time.sleep(rng.choice((0.0, 0.01, 0.05)))
        self._expect("kill", *self._ask("PUT", f"/v1/rekindle/apps/{DOOMED}", {"state": "killed"}))
        dying.join()
