"""The chief law, per engine: the same answer with and without the cache. Every test counts its hits.

Costs are not measured here: while nothing is measured, whatever is known is reused, so hits are certain.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle import Session
from rekindle.core.kv import Span
from rekindle.core.request import Reply, parse_prompt
from rekindle.engine.base import Engine, EngineSequence
from rekindle.engine.fake import FakeEngine
from rekindle.engine.filling import Filling
from rekindle.engine.hf import HfEngine
from rekindle.errors import Cancelled, Closed
from rekindle.reuse.cost import Costs, Rates
from rekindle.store.feed import StoredFeed
from tests.tiny import tiny_engine

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]

ENGINES: dict[str, Callable[[], Engine]] = {"fake": FakeEngine, "tiny": tiny_engine}
ROOM = {"disk_limit": "200MB"}
both = pytest.mark.parametrize("kind", list(ENGINES))


class Unmeasured(Costs):
    """Costs that never learn."""

    def computed(self, span: Span, seconds: float) -> None: ...

    def loaded(self, tier: object, size_bytes: int, seconds: float) -> None: ...

    @property
    def rates(self) -> Rates:
        return Rates()


def opened(engine: Engine, folder: Path | str, **settings: Any) -> Session:
    """A session that reuses whatever it knows."""
    session = Session(engine, cache=folder, **{**ROOM, **settings})
    session.cache.costs = Unmeasured()
    return session


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared machine may be slow: here no answer is too late."""
    monkeypatch.setattr("rekindle.run.cache.LOOKUP_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.run.cache.LOAD_SECONDS", 120.0)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, count)]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two prompts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@cache
def uncached(kind: str) -> Session:
    return Session(ENGINES[kind](), cache="off")


@cache
def cold(kind: str, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the engine answers without any cache."""
    reply = uncached(kind).generate(list(tokens), max_tokens=count, min_tokens=count)
    assert reply.reuse.reused == 0
    return reply.tokens


def ask(session: Session, tokens: Sequence[int], count: int = 5, **options: Any) -> Reply:
    return session.generate(list(tokens), max_tokens=count, min_tokens=count, **options)


def entries(session: Session) -> int:
    assert session.cache.store is not None
    return len(session.cache.store.disk.entries())


def is_open(sequence: EngineSequence) -> bool:
    try:
        return sequence.length >= 0
    except Closed:
        return False


def watch(engine: Any) -> list[EngineSequence]:
    """Every sequence that the engine opens from now on."""
    sequences: list[EngineSequence] = []
    real = engine.open

    def open_and_note(*args: Any) -> EngineSequence:
        sequences.append(real(*args))
        return sequences[-1]

    engine.open = open_and_note
    return sequences


def record(engine: Any) -> list[np.ndarray]:
    """Every logits that the engine gives from now on."""
    seen: list[np.ndarray] = []
    real = engine.step

    def step_and_note(*args: Any) -> list[np.ndarray]:
        logits = real(*args)
        seen.extend(array.copy() for array in logits if len(array))
        return logits

    engine.step = step_and_note
    return seen


# -- partial hits, to the token ------------------------------------------------------------------------------------

N = 100
PROMPT = tokens_of(N)


def sharing(shared: int, tail: int = 3) -> list[int]:
    """A prompt that shares exactly `shared` tokens with PROMPT, and no more with any other of these."""
    other = 251 if shared == N else (PROMPT[shared] + 1) % 250
    return [*PROMPT[:shared], other, *tokens_of(tail - 1, seed=1000 + shared)]


@pytest.mark.parametrize(
    ("kind", "order"), [("fake", "mixed"), ("tiny", "rising"), ("tiny", "falling"), ("tiny", "mixed")]
)
def test_within_the_process_a_prompt_reuses_exactly_what_it_shares(kind: str, order: str, tmp_path: Path) -> None:
    lengths = list(range(N + 1))
    if order == "falling":
        lengths.reverse()
    if order == "mixed":
        np.random.default_rng(7).shuffle(lengths)
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        session.warm([PROMPT])
        for shared in lengths:
            question = sharing(shared)
            reply = ask(session, question)
            assert reply.reuse.reused == reply.usage.cached_tokens == shared
            assert reply.reuse.computed == len(question) - shared
            assert reply.tokens == cold(kind, tuple(question), 5), shared


@both
def test_after_a_restart_a_prompt_reuses_exactly_what_it_shares(kind: str, tmp_path: Path) -> None:
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened(ENGINES[kind](), tmp_path / "cache", memory_limit=0) as session:
        for shared in range(N + 1):
            question = sharing(shared)
            reply = ask(session, question)
            assert reply.reuse.disk == reply.reuse.reused == shared
            assert reply.tokens == cold(kind, tuple(question), 5), shared


@both
def test_of_a_prompt_known_whole_only_the_last_token_is_computed(kind: str, tmp_path: Path) -> None:
    """Every beginning of it: the logits after its last token must come from somewhere."""
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened(ENGINES[kind](), tmp_path / "cache", memory_limit=0) as session:
        for count in range(1, N + 1):
            reply = ask(session, PROMPT[:count], 3)
            assert reply.reuse.disk == count - 1 and reply.reuse.computed == 1
            assert reply.tokens == cold(kind, tuple(PROMPT[:count]), 3), count


@both
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_reply_computed_is_reused_to_the_token(kind: str, restarted: bool, tmp_path: Path) -> None:
    """All of the reply but its last token, which nobody computed."""
    session = opened(ENGINES[kind](), tmp_path / "cache")
    reply = ask(session, PROMPT[:40], 30)
    assert reply.tokens == cold(kind, tuple(PROMPT[:40]), 30)
    known = [*PROMPT[:40], *reply.tokens[:-1]]
    if restarted:
        session.close()
        session = opened(ENGINES[kind](), tmp_path / "cache")
    session.flush()
    for shared in range(41, len(known) + 1, 4):
        question = [*known[:shared], 251, 7]
        again = ask(session, question)
        assert again.reuse.reused == shared
        assert again.tokens == cold(kind, tuple(question), 5)
    longer = [*known, reply.tokens[-1], 9]
    assert ask(session, longer).reuse.reused == len(known)
    session.close()


# -- at random -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(list(ENGINES)), memory=st.sampled_from([0, 300_000, "64MB"]), data=st.data())
def test_any_requests_in_any_order_get_the_same_text_and_reuse_all_that_is_known(
    kind: str, memory: Any, data: st.DataObject
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rekindle-laws-"))
    session = opened(ENGINES[kind](), folder / "cache", memory_limit=memory)
    kept: dict[tuple[str, str], list[list[int]]] = {}
    hits = misses = 0
    try:
        for _ in range(data.draw(st.integers(3, 9), "requests")):
            who = data.draw(st.sampled_from([("local", ""), ("local", "salt"), ("other", "")]), "who")
            known = kept.setdefault(who, [])
            head: list[int] = []
            everybody = [context for contexts in kept.values() for context in contexts]
            if everybody and data.draw(st.integers(0, 4), "new") > 0:
                head = data.draw(st.sampled_from(everybody), "head")
                head = head[: data.draw(st.integers(0, len(head)), "shared")]
            tail = data.draw(st.lists(st.integers(3, 6), min_size=1, max_size=40), "tail")
            tokens = [*head, *tail][:200]
            count = data.draw(st.integers(0, 6), "reply")
            flushed = data.draw(st.booleans(), "flush")
            if flushed:
                assert session.flush()
            if data.draw(st.integers(0, 4), "restart") == 0:
                session.close()
                session, flushed = opened(ENGINES[kind](), folder / "cache", memory_limit=memory), True
            off = data.draw(st.integers(0, 5), "off") == 0
            reply = ask(session, tokens, count, tenant=who[0], cache_salt=who[1], reuse="off" if off else None)
            assert reply.tokens == cold(kind, tuple(tokens), count)
            most = min(max((common(tokens, context) for context in known), default=0), len(tokens) - 1)
            if off:
                assert reply.reuse.reused == 0
                continue
            assert reply.reuse.reused <= most
            if flushed:
                assert reply.reuse.reused == most
            hits, misses = hits + (reply.reuse.reused > 0), misses + (most > reply.reuse.reused)
            known.append([*tokens, *reply.tokens[: max(0, count - 1)]])
    finally:
        session.close()
        shutil.rmtree(folder)


# -- chats ---------------------------------------------------------------------------------------------------------


class Plainspoken(FakeEngine):
    """Says printable characters only, so that what it said is tokenized as it said it."""

    def step(self, *args: Any) -> list[np.ndarray]:
        logits = super().step(*args)
        for array in logits:
            array[:, :32] = array[:, 127:256] = array[:, 257] = -np.inf
        return logits


@pytest.mark.parametrize("restarting", [False, True])
def test_each_turn_of_a_chat_computes_only_the_new_message(restarting: bool, tmp_path: Path) -> None:
    plain = Session(Plainspoken(), cache="off")
    session = opened(Plainspoken(), tmp_path / "cache")
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief, be kind, be plain."}]
    known = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"Question number {turn}, which is new. " + "?" * turn})
        if restarting and turn % 2:
            session.close()
            session = opened(Plainspoken(), tmp_path / "cache")
        reply = session.chat(messages, max_tokens=12, min_tokens=4)
        assert reply.tokens == plain.chat(messages, max_tokens=12, min_tokens=4).tokens
        assert reply.reuse.reused == known, f"turn {turn}: everything before the new message, the last reply too"
        known = reply.usage.prompt_tokens + len(reply.tokens) - 1
        messages.append({"role": "assistant", "content": reply.text})
        session.flush()
    session.close()


@both
def test_a_chat_reuses_whatever_its_tokens_have_in_common_with_the_last_turn(kind: str, tmp_path: Path) -> None:
    """A reply that is tokenized otherwise than it was said is reused as far as it is the same."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    last: list[int] = []
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        for turn in range(10):
            messages.append({"role": "user", "content": f"Question {turn}"})
            tokens = session.engine.tokenizer.encode_chat(parse_prompt(messages))
            reply = session.chat(messages, max_tokens=6)
            assert reply.tokens == uncached(kind).chat(messages, max_tokens=6).tokens
            assert reply.reuse.reused == common(tokens, last)
            assert turn == 0 or reply.reuse.reused > 10
            last = [*tokens, *reply.tokens[:-1]]
            messages.append({"role": "assistant", "content": reply.text})
            session.flush()


# -- who may share -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
@pytest.mark.parametrize("how", ["request", "session"])
@pytest.mark.parametrize("restarted", [False, True])
def test_nobody_else_is_served_and_the_same_one_is(
    kind: str, name: str, how: str, restarted: bool, tmp_path: Path
) -> None:
    folder, expected = tmp_path / "cache", cold(kind, tuple(PROMPT), 5)
    session = opened(ENGINES[kind](), folder)
    sessions = [session]

    def ask_as(who: str | None) -> Reply:
        if who is None:
            return ask(session, PROMPT)
        if how == "request":
            return ask(session, PROMPT, **{name: who})
        sessions.append(opened(ENGINES[kind](), folder, **{name: who}))
        try:
            return ask(sessions[-1], PROMPT)
        finally:
            sessions.pop().close()

    assert ask_as("a").reuse.reused == 0
    session.flush()
    if restarted:
        session.close()
        session = sessions[0] = opened(ENGINES[kind](), folder)
    for who in ("b", "A", "a ", None):
        reply = ask_as(who)
        assert reply.reuse.reused == 0, who
        assert reply.tokens == expected
    session.flush()
    again = ask_as("a")
    assert again.reuse.reused == N - 1
    assert again.tokens == expected
    session.close()


def test_a_tenant_and_a_salt_of_the_same_text_are_not_the_same(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache") as session:
        ask(session, PROMPT, tenant="ab", cache_salt="c")
        session.flush()
        assert ask(session, PROMPT, tenant="a", cache_salt="bc").reuse.reused == 0
        assert ask(session, PROMPT, tenant="c", cache_salt="ab").reuse.reused == 0
        assert ask(session, PROMPT, tenant="ab", cache_salt="c").reuse.reused == N - 1


def test_another_model_is_never_served(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened(FakeEngine(seed=1), tmp_path / "cache") as session:
        assert ask(session, PROMPT).reuse.reused == 0
    with opened(FakeEngine(), tmp_path / "cache") as session:
        assert ask(session, PROMPT).reuse.reused == N - 1


def change_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = sorted(name for name in tensors if "mlp.down_proj" in name)[-1]
    changed = tensors[name].clone()
    changed[3, 5] += 1.0
    save_file({**tensors, name: changed}, path, metadata={"format": "pt"})


def change_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# another #}")


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    known = json.loads(path.read_text())
    added = {**known["added_tokens"][-1], "id": known["added_tokens"][-1]["id"] + 1, "content": "<|another|>"}
    path.write_text(json.dumps({**known, "added_tokens": [*known["added_tokens"], added]}))


def change_config(folder: Path) -> None:
    path = folder / "config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "rms_norm_eps": 1e-3}))


CHANGES: dict[str, Callable[[Path], None]] = {
    "weight": change_weight,
    "template": change_template,
    "tokenizer": change_tokenizer,
    "config": change_config,
}


@pytest.fixture
def warmed(tiny_folder: Path, tmp_path: Path) -> Path:
    """A cache folder in which the tiny model's KV of PROMPT is."""
    with loaded(tiny_folder, tmp_path / "cache") as session:
        session.warm([PROMPT])
    return tmp_path / "cache"


def loaded(model: Path, folder: Path, dtype: str = "float32") -> Session:
    session = Session(model, cache=folder, device="cpu", dtype=dtype, **ROOM)
    session.cache.costs = Unmeasured()
    return session


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_was_changed_is_never_served_the_old_ones_kv(
    change: str, in_place: bool, warmed: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    if in_place:  # the folder's own digests are remembered from before the change
        with loaded(copy, warmed) as session:
            assert ask(session, PROMPT).reuse.reused == N - 1
    CHANGES[change](copy)
    with loaded(copy, warmed) as session:
        reply = ask(session, PROMPT)
        assert reply.reuse.reused == 0
        assert reply.tokens == ask(session, PROMPT, reuse="off").tokens
        session.flush()
        assert ask(session, PROMPT).reuse.reused == N - 1, "its own KV it does find"
    with loaded(tiny_folder, warmed) as session:
        assert ask(session, PROMPT).reuse.reused == N - 1, "the old one's KV is still the old one's"


def test_an_unchanged_copy_in_another_folder_is_the_same_model(warmed: Path, tiny_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "elsewhere" / "with another name"))
    with loaded(copy, warmed) as session:
        reply = ask(session, PROMPT)
        assert reply.reuse.disk == N - 1
        assert reply.tokens == ask(session, PROMPT, reuse="off").tokens


def test_other_numbers_have_other_kv(warmed: Path, tiny_folder: Path) -> None:
    with loaded(tiny_folder, warmed, "bfloat16") as session:
        reply = ask(session, PROMPT)
        assert reply.reuse.reused == 0
        assert reply.tokens == ask(session, PROMPT, reuse="off").tokens
        session.flush()
    with loaded(tiny_folder, warmed, "bfloat16") as session:
        again = ask(session, PROMPT)
        assert again.reuse.disk == N - 1
        assert again.tokens == reply.tokens
    with loaded(tiny_folder, warmed) as session:
        assert ask(session, PROMPT).reuse.reused == N - 1


# -- to the last bit -----------------------------------------------------------------------------------------------


def long_engine() -> HfEngine:
    return tiny_engine("llama", max_position_embeddings=2048)


def logits_of(folder: Path, prompts: Sequence[Sequence[int]], restarts: bool, **settings: Any) -> Any:
    """Reply and logits of the last of the prompts, after the others were asked."""
    session = opened(long_engine(), folder, deterministic=True, **settings)
    for prompt in prompts[:-1]:
        ask(session, prompt, 4)
        session.flush()
    if restarts:
        session.close()
        session = opened(long_engine(), folder, deterministic=True, **settings)
    seen = record(session.engine)
    reply = ask(session, prompts[-1], 6)
    session.close()
    return reply, seen


def assert_bit_equal(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(ours, theirs), f"step {step} is off by {np.abs(ours - theirs).max()}"


@pytest.mark.parametrize("restarts", [False, True])
def test_deterministic_logits_are_bit_equal_cold_and_warm_at_every_split(
    restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 32
    monkeypatch.setattr("rekindle.run.cache.PIECE_TOKENS", piece)
    prompt = tokens_of(150, seed=5)
    _, expected = logits_of(tmp_path / "cold", [prompt], restarts=False)
    splits = range(0, 151, 2 if restarts else 3)

    def before(split: int) -> None:  # each split has a salt, so that none knows of the others
        ask(session, [*prompt[:split], 251, *tokens_of(20, seed=split)], 4, cache_salt=str(split))

    session = opened(long_engine(), tmp_path / "cache", deterministic=True)
    if restarts:
        for split in splits:
            before(split)
        session.close()
        session = opened(long_engine(), tmp_path / "cache", deterministic=True)
    seen = record(session.engine)
    for split in splits:
        if not restarts:
            before(split)
            session.flush()
        seen.clear()
        reply = ask(session, prompt, 6, cache_salt=str(split))
        assert reply.reuse.reused == min(split, len(prompt) - 1) // piece * piece
        assert_bit_equal(seen, expected)
    session.close()


@pytest.mark.parametrize("settings", [{}, {"memory_limit": 0}, {"memory_limit": "64MB"}])
@pytest.mark.parametrize("split", [255, 256, 511, 512, 600, 700])
def test_deterministic_logits_are_bit_equal_with_pieces_as_they_are(split: int, settings: Any, tmp_path: Path) -> None:
    prompt = tokens_of(700, seed=6)
    _, expected = logits_of(tmp_path / "cold", [prompt], restarts=False)
    reply, got = logits_of(tmp_path / "warm", [[*prompt[:split], 251, 9], prompt], bool(settings), **settings)
    assert reply.reuse.reused == min(split, 699) // 256 * 256
    assert_bit_equal(got, expected)


def test_deterministic_logits_are_bit_equal_whatever_chats_went_before(tmp_path: Path) -> None:
    """What was decoded token by token is not reused: it was computed in other company."""
    prompt = tokens_of(300, seed=8)
    with opened(long_engine(), tmp_path / "cache", deterministic=True) as session:
        reply = ask(session, prompt, 260)
        following = [*prompt, *reply.tokens, *tokens_of(20, seed=9)]
        session.flush()
        seen = record(session.engine)
        again = ask(session, following, 3)
        assert again.reuse.reused == 256
    _, expected = logits_of(tmp_path / "cold", [following], restarts=False)
    assert_bit_equal(seen, expected[:3])


def test_kv_of_other_pieces_is_on_another_shelf(tmp_path: Path) -> None:
    prompt = tokens_of(600, seed=10)
    with opened(long_engine(), tmp_path / "cache") as session:
        session.warm([prompt])
    with opened(long_engine(), tmp_path / "cache", deterministic=True) as session:
        assert ask(session, prompt).reuse.reused == 0
        session.flush()
    with opened(long_engine(), tmp_path / "cache", deterministic=True) as session:
        assert ask(session, prompt).reuse.disk == 512
    with opened(long_engine(), tmp_path / "cache") as session:
        assert ask(session, prompt).reuse.disk == 599


# -- off -----------------------------------------------------------------------------------------------------------


@both
def test_reuse_off_neither_reads_nor_keeps(kind: str, tmp_path: Path) -> None:
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        sequences = watch(session.engine)
        first = ask(session, PROMPT, reuse="off")
        session.flush()
        assert entries(session) == 0
        assert not any(map(is_open, sequences)), "nothing of it stays in the engine"
        second = ask(session, PROMPT)
        assert second.reuse.reused == 0, "nothing of it was kept"
        session.flush()
        kept = entries(session)
        third = ask(session, [*PROMPT, 5, 6], reuse="off")
        assert (third.reuse.reused, third.reuse.level, third.reuse.miss) == (0, "off", "off")
        assert third.usage.cached_tokens == 0
        session.flush()
        assert entries(session) == kept
        assert ask(session, [*PROMPT, 5, 6]).reuse.reused == N, "what was known before is still known"
        assert first.tokens == second.tokens == cold(kind, tuple(PROMPT), 5)


@both
@pytest.mark.parametrize("settings", [{"cache": "off"}, {"reuse": "off"}])
def test_a_session_without_reuse_leaves_no_trace(kind: str, settings: Any, tmp_path: Path) -> None:
    with Session(ENGINES[kind](), **{"cache": tmp_path / "cache", **settings}) as session:
        sequences = watch(session.engine)
        for _ in range(2):
            reply = ask(session, PROMPT, reuse="exact")
            assert reply.reuse.reused == 0
            assert reply.tokens == cold(kind, tuple(PROMPT), 5)
        assert not any(map(is_open, sequences))
    assert not (tmp_path / "cache").exists()


def test_kv_older_than_its_time_to_live_is_not_served(tmp_path: Path) -> None:
    """Wherever it is: on disk, in memory, or still in the engine."""
    with opened(FakeEngine(), tmp_path / "cache", ttl="2s") as session:
        started = time.monotonic()
        ask(session, PROMPT)
        session.flush()
        soon = ask(session, PROMPT)
        assert soon.reuse.reused == N - 1 or time.monotonic() - started > 2
        time.sleep(2.5)
        late = ask(session, PROMPT)
        assert late.tokens == cold("fake", tuple(PROMPT), 5)
        assert late.reuse.reused == 0


# -- cancelling ----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_what_a_cancelled_stream_computed_is_right_for_the_next(
    kind: str, how: str, after: int, tmp_path: Path
) -> None:
    """Its prompt and what was decoded until then are known, and nothing that is not true."""
    expected = cold(kind, tuple(PROMPT), 12)
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        steps = record(session.engine)
        stream = session.stream(PROMPT, max_tokens=200, min_tokens=200)
        while len(steps) < after:
            next(stream)
        getattr(stream, how)()
        assert list(stream) == []
        again = ask(session, PROMPT, 12)
        assert again.reuse.reused == N - 1
        assert again.tokens == expected
    with opened(ENGINES[kind](), tmp_path / "cache") as session:
        known = [*PROMPT, *expected[: after - 1]]
        longer = ask(session, [*known, 251, 4])
        assert longer.reuse.disk >= len(known)
        assert longer.tokens == cold(kind, (*known, 251, 4), 5)


@pytest.mark.parametrize("warm", ["cold", "parked", "disk"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_prefill_that_is_cancelled_leaves_nothing_half_computed(warm: str, layer: int, tmp_path: Path) -> None:
    question = [*PROMPT, *tokens_of(20, seed=3)]
    if warm != "cold":
        with opened(FakeEngine(), tmp_path / "cache") as session:
            session.warm([PROMPT])
    with opened(FakeEngine(), tmp_path / "cache") as session:
        if warm == "parked":
            ask(session, PROMPT, 0)
        engine: Any = session.engine
        sequences = watch(engine)
        stream = session.stream(question, max_tokens=5, min_tokens=5)
        real = engine._layer

        def cancel(number: int, *rest: Any) -> Any:
            if number == layer:
                stream.cancel()
            return real(number, *rest)

        engine._layer = cancel
        assert list(stream) == []
        with pytest.raises(Cancelled):
            _ = stream.reply
        engine._layer = real
        assert not any(map(is_open, sequences))
        reply = ask(session, question)
        assert reply.tokens == cold("fake", tuple(question), 5)
        assert reply.reuse.reused == (0 if warm == "cold" else N)


# -- several at once -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("memory", [0, "64MB"])
def test_threads_that_share_prefixes_get_the_right_text_and_leak_nothing(
    kind: str, memory: Any, tmp_path: Path
) -> None:
    shared = tokens_of(60, seed=20)
    prompts = [[*shared[: 20 + 10 * (i % 5)], *tokens_of(10 + i, seed=21 + i)] for i in range(10)]
    expected = [cold(kind, tuple(prompt), 8) for prompt in prompts]
    session = opened(ENGINES[kind](), tmp_path / "cache", memory_limit=memory)
    sequences = watch(session.engine)
    wrong: list[object] = []
    reused: list[int] = []

    def work(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(prompts))
        for index in map(int, order):
            try:
                reply = ask(session, prompts[index], 8)
                reused.append(reply.reuse.reused)
                if reply.tokens != expected[index]:
                    wrong.append((number, index, reply.reuse))
            except BaseException as error:  # noqa: BLE001  (shown below)
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(reused) == 50 and sum(count > 0 for count in reused) >= 25
    assert sum(map(is_open, sequences)) <= (0 if memory == 0 else 8), "only parked contexts are open"
    session.flush()
    session.close()
    assert not any(map(is_open, sequences))
    with opened(ENGINES[kind](), tmp_path / "cache") as again:
        for prompt, tokens in zip(prompts, expected, strict=True):
            reply = ask(again, prompt, 8)
            assert reply.reuse.reused == len(prompt) - 1
            assert reply.tokens == tokens


def test_a_thread_that_fills_may_end_late_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread of a feed may still be alive when the step that it fed is through."""
    with opened(tiny_engine(), tmp_path / "cache") as session:
        session.warm([PROMPT])
    real = Filling._fill_all

    def ending_late(self: Filling) -> None:
        real(self)
        time.sleep(0.3)

    monkeypatch.setattr(Filling, "_fill_all", ending_late)
    with opened(tiny_engine(), tmp_path / "cache") as session:
        reply = ask(session, PROMPT, 12)
        assert reply.reuse.disk == N - 1
        assert reply.tokens == cold("tiny", tuple(PROMPT), 12)
        again = ask(session, [*PROMPT, *reply.tokens[:5], 4], 12)
        assert again.reuse.reused == N + 5
        assert again.tokens == cold("tiny", (*PROMPT, *reply.tokens[:5], 4), 12)


def test_a_load_that_waited_for_the_engine_is_not_called_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others compute first: that is no fault of the cache, and computing everything would only take longer."""
    with opened(tiny_engine(), tmp_path / "cache") as session:
        session.warm([PROMPT])
    monkeypatch.setattr("rekindle.run.cache.LOAD_SECONDS", 1.0)
    real = StoredFeed.fill
    monkeypatch.setattr(StoredFeed, "fill", lambda *args: (time.sleep(0.02), real(*args))[1])
    with opened(tiny_engine(), tmp_path / "cache") as session:
        lock = session.engine._lock  # type: ignore[attr-defined]
        lock.acquire()
        threading.Timer(2.5, lock.release).start()
        reply = ask(session, PROMPT)
        assert reply.tokens == cold("tiny", tuple(PROMPT), 5)
        assert reply.reuse.disk == N - 1


# -- memory --------------------------------------------------------------------------------------------------------


def parked_bytes(session: Session) -> int:
    parked = session.cache._parked
    with parked._lock:
        return sum(context.size_bytes for context in parked._parked)


def held_bytes(session: Session) -> int:
    """What the arrays of the memory tier keep from being freed, whole as they were made."""
    assert session.cache.store is not None
    owners = {}
    for held in list(session.cache.store.memory._held.values()):
        for layer in held.layers:
            for array in (layer.keys, layer.values):
                while isinstance(array.base, np.ndarray):
                    array = array.base
                owners[id(array)] = array.nbytes
    return sum(owners.values())


@both
@pytest.mark.parametrize("limit", [0, 100_000, 700_000])
def test_parked_contexts_and_held_kv_never_exceed_the_memory_limit(kind: str, limit: int, tmp_path: Path) -> None:
    worst: list[int] = []
    running = True

    def look() -> None:
        while running:
            worst.append(parked_bytes(session) + held_bytes(session))
            time.sleep(0.001)

    with opened(ENGINES[kind](), tmp_path / "cache", memory_limit=limit) as session:
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            reused = 0
            for number in range(30):
                prompt = [*PROMPT[: 10 * (number % 7)], *tokens_of(20 + number, seed=number)]
                reused += ask(session, prompt, 4).reuse.reused
                if number % 4 == 0:
                    session.flush()
                worst.append(parked_bytes(session) + held_bytes(session))
            session.flush()
            assert session.cache.store is not None
            session.cache.store.tend()
        finally:
            running = False
            watcher.join()
        worst.append(parked_bytes(session) + held_bytes(session))
        assert max(worst) <= limit
        assert limit < 700_000 or max(worst) > 0
        assert reused > 0


def test_the_memory_tier_keeps_no_more_from_being_freed_than_it_counts(tmp_path: Path) -> None:
    """Also of KV that was copied in a hurry and of which only a part is admitted."""
    session = opened(FakeEngine(), tmp_path / "cache", admission="second-use", memory_limit="64MB")
    store, keeper = session.cache.store, session.cache.keeper
    assert store is not None and keeper is not None
    session.warm([PROMPT])  # met once
    session.cache.unpark()
    gate, real = threading.Event(), store.gap
    store.gap = lambda *args: (gate.wait(60), real(*args))[1]  # type: ignore[method-assign]
    question = [*PROMPT[:64], *tokens_of(300, seed=30)]
    ask(session, question, 1)
    assert ask(session, [*question[:200], 251], 1).reuse.engine == 200  # goes on from it: what is to be kept is copied
    gate.set()
    session.flush()
    assert len(store.memory) > 0
    assert held_bytes(session) <= store.memory.size_bytes
    session.close()


# -- a rope that changes -------------------------------------------------------------------------------------------

SWITCH = 48


def changing_engine() -> HfEngine:
    """A Phi-3 that changes its rotary frequencies past 48 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": SWITCH,
    }
    return tiny_engine("phi3", rope_parameters=rope, original_max_position_embeddings=SWITCH, sliding_window=None)


@pytest.fixture(scope="module")
def changing() -> Iterator[Session]:
    yield Session(changing_engine(), cache="off")


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("count", [SWITCH - 20, SWITCH - 1, SWITCH])
def test_a_reply_that_crosses_into_another_rope_is_the_same_with_a_cache(
    restarted: bool, count: int, changing: Session, tmp_path: Path
) -> None:
    prompt = tokens_of(count, seed=40)
    expected = ask(changing, prompt, 40)
    session = opened(changing_engine(), tmp_path / "cache")
    first = ask(session, prompt, 40)
    assert first.reuse.reused == 0 and first.tokens == expected.tokens
    session.flush()
    if restarted:
        session.close()
        session = opened(changing_engine(), tmp_path / "cache")
    second = ask(session, prompt, 40)
    assert second.reuse.reused == count - 1
    assert second.tokens == expected.tokens
    session.flush()
    other = [*prompt[: count - 5], 251, 250, 249]  # stays below, then crosses
    assert ask(session, other, 40).tokens == ask(changing, other, 40).tokens
    known = [*prompt, *expected.tokens[:-1]]
    following = [*known, *tokens_of(9, seed=41)]
    longer = ask(session, following, 10)
    assert longer.reuse.reused == len(known), "all of it, as computed under the long rope"
    assert longer.tokens == ask(changing, following, 10).tokens
    session.close()


def test_kv_of_one_rope_is_never_served_under_another(changing: Session, tmp_path: Path) -> None:
    short = tokens_of(SWITCH - 2, seed=42)
    long = [*short, *tokens_of(20, seed=43)]
    with opened(changing_engine(), tmp_path / "cache") as session:
        session.warm([short])
        reply = ask(session, long, 5)
        assert reply.reuse.reused == 0
        assert reply.tokens == ask(changing, long, 5).tokens
        session.flush()
        assert ask(session, short, 1).reuse.reused == len(short) - 1
        assert ask(session, long[: SWITCH + 3], 5).reuse.reused == SWITCH + 2
        back = ask(session, long[:SWITCH], 1)
        assert back.reuse.reused == len(short), "the short rope knows what it computed itself"
        assert back.tokens == ask(changing, long[:SWITCH], 1).tokens
