"""Sessions over models whose state cannot be cut: reuse by checkpoint, where messages end. Same answers as without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle import Session
from rekindle.cache.checkpoint_kv import GRID_TOKENS, CheckpointKv
from rekindle.core.kv import Kv
from rekindle.core.reply import Reply
from rekindle.engine.llamacpp import engine as module
from rekindle.engine.llamacpp.sequence import LlamaSequence
from rekindle.engine.llamacpp.state import UnknownLayout
from rekindle.errors import KvLost
from rekindle.store.catalog import catalog
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.tiny_hybrids import OPAQUE, write_gemma2, write_mamba, write_qwen2vl
from tests.unmeasured_costs import UnmeasuredCosts

pytestmark = [pytest.mark.llamacpp]

Chat = list[dict[str, str]]
Open = Callable[..., Session]

SYSTEM = {"role": "system", "content": "You look after a lighthouse and write down the wind every morning."}
ASKED = [
    "What was the wind like today, and did you see any ships go by?",
    "And how was it the day before? Please tell me in one sentence.",
    "Thank you. How many gulls were there on the rocks at noon?",
    "Good night.",
]
FORCED = "forced"


@pytest.fixture(params=[*OPAQUE, FORCED])
def path(request: pytest.FixtureRequest, tiny: Path, opaque_files: dict[str, Path]) -> Path:
    if request.param != FORCED:
        return opaque_files[request.param]
    force(request.getfixturevalue("monkeypatch"))
    return tiny


def force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no layout be known."""

    def refuse(state: np.ndarray, cells: int) -> None:
        raise UnknownLayout("forced")

    monkeypatch.setattr(module, "read_layout", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def start(path: Path, folder: Path) -> Iterator[Open]:
    """Opens a session over the model; all are closed with the test."""
    opened: list[Session] = []

    def begin(file: Path = path, cache: Path | str = folder, **settings: Any) -> Session:
        given = {"disk_limit": "200MB", "threads": 1, "swa_full": False, **settings}
        session = Session(str(file), engine="llamacpp", cache=str(cache), **given)
        session.cache.kv.costs = UnmeasuredCosts()
        opened.append(session)
        return session

    yield begin
    for session in opened:
        session.close()


def ask(session: Session, chat: Chat, **options: Any) -> Reply:
    return session.chat(chat, max_tokens=10, min_tokens=10, **options)


def talk(next_session: Callable[[], Session]) -> tuple[list[str], list[Reply]]:
    """A conversation of some turns, each with the session that is given for it."""
    chat: Chat = [SYSTEM]
    replies = []
    for text in ASKED:
        chat = [*chat, {"role": "user", "content": text}]
        replies.append(ask(next_session(), chat))
        chat = [*chat, {"role": "assistant", "content": replies[-1].text}]
    return [reply.text for reply in replies], replies


def message_ends(session: Session, chat: Chat) -> list[int]:
    """After how many tokens each message of a chat ends."""
    from rekindle.core.request import parse_prompt

    tokens = session.engine.tokenizer.encode_chat(parse_prompt(chat))
    return [place + 1 for place, token in enumerate(tokens) if token in session.engine.tokenizer.stop_ids]


def test_a_conversation_is_the_same_with_and_without_the_cache(start: Open) -> None:
    without = start(cache="off")
    expected, cold = talk(lambda: without)
    assert len(set(expected)) == len(expected) and not any(reply.reuse.reused for reply in cold)
    session = start()
    assert isinstance(session.cache.kv, CheckpointKv)
    texts, replies = talk(lambda: session)
    assert texts == expected
    assert replies[0].reuse.reused == 0 and all(reply.reuse.reused > 60 for reply in replies[1:])
    again, more = talk(lambda: session)  # and all of it once more
    assert again == expected and all(reply.reuse.reused > 60 for reply in more)


def test_each_turn_goes_on_from_where_the_last_prompts_messages_ended(start: Open, folder: Path) -> None:
    """Every turn in a session of its own: what one kept on disk, the next one finds."""
    without = start(cache="off")
    expected, _ = talk(lambda: without)
    sessions: list[Session] = []

    def restarted() -> Session:
        for old in sessions:
            old.close()
        sessions.append(start())
        return sessions[-1]

    texts, replies = talk(restarted)
    assert texts == expected
    chat: Chat = [SYSTEM]
    for text, earlier, reply in zip(ASKED, replies, replies[1:], strict=False):
        chat = [*chat, {"role": "user", "content": text}]
        ends = message_ends(without, chat)
        assert reply.reuse.disk == reply.reuse.reused >= ends[-1], "what the prompt before it shares"
        assert reply.reuse.miss in (None, "checkpoint")
        chat = [*chat, {"role": "assistant", "content": earlier.text}]


def test_another_question_after_the_same_beginning_reuses_the_beginning(start: Open) -> None:
    session, without = start(), start(cache="off")
    first = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    other = [SYSTEM, {"role": "user", "content": "Which colours does the sea have?"}]
    ask(session, first)
    session.flush()
    reply = ask(session, other)
    assert reply.text == ask(without, other).text
    assert reply.reuse.reused == message_ends(without, other)[0] and reply.reuse.miss == "checkpoint"


def test_the_same_prompt_again_is_computed_from_its_last_message_on(start: Open) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    session = start()
    first = ask(session, chat)
    session.close()
    second = ask(start(), chat)
    assert second.text == first.text
    assert second.reuse.disk == message_ends(start(cache="off"), chat)[-1]


def test_a_text_without_messages_is_kept_on_a_grid(folder: Path, tmp_path: Path) -> None:
    path = write_gemma2(tmp_path / "long.gguf", context=4096)
    text = "Every morning the keeper wrote down the wind. " * 30  # a token a letter
    shared, other = text[:1200], text[:1200] + "Then it was noon."
    settings: dict[str, Any] = {"engine": "llamacpp", "threads": 1, "swa_full": False, "disk_limit": "200MB"}
    with Session(str(path), cache="off", **settings) as without:
        expected = without.generate(other, max_tokens=8, min_tokens=8).text
    with Session(str(path), cache=str(folder), **settings) as session:
        session.generate(shared + " And then?", max_tokens=3)
    with Session(str(path), cache=str(folder), **settings) as session:
        session.cache.kv.costs = UnmeasuredCosts()
        reply = session.generate(other, max_tokens=8, min_tokens=8)
    assert reply.text == expected
    assert reply.reuse.disk == 1200 // GRID_TOKENS * GRID_TOKENS


def test_deterministic_prefills_are_reused_in_whole_pieces(path: Path, start: Open) -> None:
    words = "Every morning the keeper wrote down the wind. " * 7
    first, second = words + "One.", words + "Two, and three."
    without = start(cache="off", deterministic=True)
    expected = [without.generate(text, max_tokens=8, min_tokens=8).tokens for text in (first, second)]
    session = start(deterministic=True)
    assert session.generate(first, max_tokens=8, min_tokens=8).tokens == expected[0]
    session.flush()
    reply = session.generate(second, max_tokens=8, min_tokens=8)
    assert reply.tokens == expected[1] and reply.reuse.reused == 256


def test_another_tenant_or_salt_finds_nothing(start: Open) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    session = start()
    first = ask(session, chat)
    session.flush()
    for options in ({"tenant": "other"}, {"cache_salt": "other"}, {"reuse": "off"}):
        reply = ask(session, chat, **options)
        assert reply.text == first.text and reply.reuse.reused == 0
    assert ask(session, chat).reuse.reused > 60
    assert ask(session, chat, tenant="other").reuse.reused > 60, "by now it has its own"


def test_a_model_of_other_weights_finds_nothing(tmp_path: Path, folder: Path) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    for seed in (0, 1):
        path = write_qwen2vl(tmp_path / "model.gguf", seed=seed)
        with Session(str(path), engine="llamacpp", cache=str(folder), threads=1, swa_full=False) as session:
            assert ask(session, chat).reuse.reused == 0
            assert session.flush()
            assert ask(session, chat).reuse.reused > 60


def test_a_state_of_more_pages_than_the_prompt_has_tokens_is_kept_in_every_turn(tmp_path: Path, folder: Path) -> None:
    """As with most real models: pages are counted in pages, tokens in tokens."""
    path = write_mamba(tmp_path / "large.gguf", context=1024, state=8192)
    sessions: list[Session] = []

    def restarted() -> Session:
        for old in sessions:
            old.close()
        sessions.append(
            Session(str(path), engine="llamacpp", cache=str(folder), threads=1, swa_full=False, disk_limit="500MB")
        )
        sessions[-1].cache.kv.costs = UnmeasuredCosts()
        return sessions[-1]

    _, replies = talk(restarted)
    with TieredStore(folder, StoreSettings(memory_limit=0)) as store:
        assert max(row.tokens for row in store.disk.entries()) > replies[-1].usage.prompt_tokens
    chat: Chat = [SYSTEM]
    for text, earlier, reply in zip(ASKED, replies, replies[1:], strict=False):
        chat = [*chat, {"role": "user", "content": text}]
        assert reply.reuse.disk >= message_ends(sessions[-1], chat)[-1]
        chat = [*chat, {"role": "assistant", "content": earlier.text}]
    sessions[-1].close()


# What goes wrong is computed


def entries(folder: Path) -> list[catalog.Extent]:
    with TieredStore(folder, StoreSettings(memory_limit=0)) as store:
        return store.disk.entries()


def spoiled(start: Open, folder: Path, spoil: Callable[[], None], **settings: Any) -> None:
    """Keep a chat, spoil what was kept, ask again: the same answer, computed. Ask once more: it is kept again; of a
    split state, whose parts are found damaged one by one, after some more."""
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    session = start(**settings)
    expected = ask(session, chat)
    assert session.flush()
    session.close()
    spoil()
    session = start(**settings)
    reply = ask(session, chat)
    assert reply.text == expected.text and reply.reuse.reused < expected.usage.prompt_tokens // 2
    assert session.flush()
    parts = len(entries(folder)) if session.engine.capabilities.split else 1
    session.close()
    last = message_ends(start(cache="off"), chat)[-1]
    for _ in range(parts):
        session = start(**settings)
        healed = ask(session, chat)
        assert healed.text == expected.text
        if healed.reuse.disk >= last:
            return
        assert session.flush()
        session.close()
    pytest.fail("it does not heal")


def test_a_corrupted_checkpoint_is_computed_not_served(start: Open, folder: Path) -> None:
    def flip() -> None:
        with TieredStore(folder, StoreSettings(memory_limit=0)) as store:
            files = [store.disk.extents.path(row.name) for row in store.disk.entries()]
        for file in files:
            data = bytearray(file.read_bytes())
            data[-100] ^= 1
            file.write_bytes(data)

    spoiled(start, folder, flip)


def test_a_checkpoint_that_is_gone_is_computed(start: Open, folder: Path) -> None:
    def remove() -> None:
        with TieredStore(folder, StoreSettings(memory_limit=0)) as store:
            assert store.disk.remove(store.disk.entries()) > 0

    spoiled(start, folder, remove)


def test_a_checkpoint_that_is_not_taken_is_computed(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    session = start()
    expected = ask(session, chat)
    session.close()

    def refuse(self: LlamaSequence, snapshot: bytes, length: int, kv: Kv | None = None) -> None:
        raise KvLost("llama.cpp does not take the snapshot.")

    monkeypatch.setattr(LlamaSequence, "restore", refuse)
    session = start()
    reply = ask(session, chat)
    assert reply.text == expected.text and (reply.reuse.reused, reply.reuse.miss) == (0, "lost")


def large(tmp_path: Path) -> tuple[Path, Chat]:
    """A model and a chat whose checkpoint takes several blocks of pages."""
    chat = [{"role": "system", "content": SYSTEM["content"] * 45}, {"role": "user", "content": ASKED[0]}]
    return write_qwen2vl(tmp_path / "large.gguf", context=4096), chat


@pytest.mark.parametrize("kept_blocks", [1, 2])
def test_a_checkpoint_of_which_some_pages_were_evicted_is_computed(
    kept_blocks: int, tmp_path: Path, folder: Path
) -> None:
    path, chat = large(tmp_path)
    settings: dict[str, Any] = {
        "engine": "llamacpp",
        "threads": 1,
        "swa_full": False,
        "disk_limit": "200MB",
        "kv_type": "f32",
    }

    def answer(cache: Path | str = folder) -> Reply:
        with Session(str(path), cache=str(cache), **settings) as session:
            session.cache.kv.costs = UnmeasuredCosts()
            return ask(session, chat)

    expected = answer("off")
    answer()
    assert answer().reuse.disk > 2500, "the test needs a checkpoint"
    with TieredStore(folder, StoreSettings(memory_limit=0)) as store:
        rows = [row for row in store.disk.entries() if row.tokens > 32 * kept_blocks]
        assert rows, "the test needs a checkpoint of several blocks"
        with store.disk.database.writing() as connection:
            for row in rows:
                catalog.cut(connection, row.id, kept_blocks)  # the end goes first, as evicting does it
    reply = answer()
    assert reply.text == expected.text and reply.reuse.reused < 2500
    healed = answer()
    assert healed.text == expected.text and healed.reuse.disk > 2500, "it does not heal"


def test_a_tiny_cache_evicts_and_never_answers_otherwise(tmp_path: Path, folder: Path) -> None:
    path, _ = large(tmp_path)
    settings: dict[str, Any] = {
        "engine": "llamacpp",
        "threads": 1,
        "swa_full": False,
        "memory_limit": "1MB",
        "disk_limit": "6MB",
    }
    chats = [
        [{"role": "system", "content": f"{n}. " + SYSTEM["content"] * 25}, {"role": "user", "content": ASKED[0]}]
        for n in range(4)
    ]
    with Session(str(path), cache="off", **settings) as without:
        expected = [ask(without, chat).text for chat in chats]
    with Session(str(path), cache=str(folder), **settings) as session:
        session.cache.kv.costs = UnmeasuredCosts()
        for _ in range(3):
            for chat, text in zip(chats, expected, strict=True):
                assert ask(session, chat).text == text
        assert session.flush()
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 6_000_000


def test_flash_attention_switched_on_later_reuses_after_the_first_time(start: Open) -> None:
    """What was kept without it may not fit; then it is kept anew, and not found lost for ever."""
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    for flash in ("off", "on"):
        session = start(flash_attention=flash)
        expected = ask(session, chat)
        session.close()
        session = start(flash_attention=flash)
        reply = ask(session, chat)
        assert reply.text == expected.text and reply.reuse.disk > 60
        session.close()


# Explained, warmed, shared


def test_explain_says_that_reuse_is_by_checkpoint_and_why(path: Path, start: Open) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    other = [SYSTEM, {"role": "user", "content": "Which colours does the sea have?"}]
    session = start()
    before = session.explain(chat)
    assert before.reason.kind == "new" and before.reused == 0
    ask(session, chat)
    session.flush()
    after = session.explain(other)
    why = "forced" if path.stem == "tiny" else OPAQUE[path.stem][1]
    assert after.opaque is not None and why in after.opaque
    assert after.reason.kind == "checkpoint" and after.reused == message_ends(session, other)[0]
    told = str(after)
    assert f"reuse is by checkpoint, at the end of a message: {after.opaque}" in told
    assert "can only be reused at checkpoints" in told and "computed" in told
    assert after.difference is None, "pages of a state are no tokens to compare"
    assert type(after).from_dict(after.as_dict()) == after
    reply = ask(session, other)
    assert reply.reuse.reused == after.reused, "as it was explained"


def test_explaining_changes_nothing(start: Open) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    session = start()
    first = ask(session, chat)
    assert session.flush()
    longer = [*chat, {"role": "assistant", "content": first.text}, {"role": "user", "content": ASKED[1]}]
    explained = [session.explain(longer).reused for _ in range(3)]
    assert len(set(explained)) == 1 and ask(session, longer).reuse.reused == explained[0]


def test_what_was_warmed_starts_from_there(start: Open) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    session = start()
    session.warm([chat])
    session.close()
    session = start()
    reply = ask(session, chat)
    assert reply.reuse.disk >= message_ends(session, chat)[-1]
    assert reply.text == ask(start(cache="off"), chat).text


def test_a_reply_that_was_cut_off_leaves_a_sound_cache(start: Open) -> None:
    chat = [SYSTEM, {"role": "user", "content": ASKED[0]}]
    expected = ask(start(cache="off"), chat)
    session = start()
    for _ in range(3):
        with session.stream(chat, max_tokens=50, min_tokens=50) as stream:
            next(stream)
    reply = ask(session, chat)
    assert reply.text == expected.text


def test_threads_do_not_disturb_each_other(start: Open) -> None:
    chats = [[SYSTEM, {"role": "user", "content": text}] for text in ASKED]
    without = start(cache="off")
    expected = [ask(without, chat).text for chat in chats]
    session = start()
    got: dict[tuple[int, int], str] = {}

    def work(thread: int) -> None:
        for number in range(len(chats)):
            place = (number + thread) % len(chats)
            got[thread, place] = ask(session, chats[place]).text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(got[thread, place] == expected[place] for thread in range(4) for place in range(len(chats)))
