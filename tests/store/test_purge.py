"""Removing every trace of runs of tokens: what goes, what stays, and that nothing of it is left in any file."""

from __future__ import annotations

import random
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.core.identity import Identity
from rekindle.core.keys import BLOCK_TOKENS, KvSpace, Namespace, token_bytes
from rekindle.core.kv import Span
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.store import history
from rekindle.store.catalog import catalog
from rekindle.store.check import check
from rekindle.store.disk import CATALOG
from rekindle.store.purge import Purged, TokenRun
from rekindle.store.purge_search import MIN_TOKENS, Segment, Snippets, TokenRuns
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from rekindle.text.visible import visible
from tests.kvs import KV_SPACE, SMALL, keep, load, make_kv

pytestmark = pytest.mark.thorough

ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)
KEYED = replace(ROOMY, key=bytes(range(32)))
OTHER_TENANT = KvSpace(Namespace("synthetic", tenant="somebody else"), SMALL)
OTHER_SALT = KvSpace(Namespace("synthetic", salt="pepper"), SMALL)
WINDOW = 8


def run(tokens: Sequence[int], tokenizer: str = "words") -> TokenRun:
    return TokenRun(tokenizer, token_bytes(tokens))


def purge(store: TieredStore, *runs: Sequence[int], texts: Sequence[str] = ()) -> Purged:
    return store.purge("local", "", [run(tokens) for tokens in runs], texts=texts)


def numbers(seed: int, count: int) -> list[int]:
    """Tokens that are nowhere else."""
    rng = random.Random(seed)
    return [rng.randrange(1 << 15, 1 << 16) for _ in range(count)]


def forms(tokens: Sequence[int]) -> Iterator[bytes]:
    """How eight tokens could stand in a file: binary, hexadecimal, decimal."""
    for start in range(len(tokens) - WINDOW + 1):
        part = tokens[start : start + WINDOW]
        for format in ("<I", ">I", "<H", ">H", "<Q"):
            packed = b"".join(struct.pack(format, token) for token in part)
            yield from (packed, packed.hex().encode())
        for comma in (",", ", ", " "):
            yield comma.join(map(str, part)).encode()


def traces(folder: Path, tokens: Sequence[int]) -> list[str]:
    """The files in which eight of these tokens stand side by side, in any form."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [path.name for path, data in files.items() if any(form in data for form in forms(tokens))]


def kv_traces(folder: Path, prompt: Sequence[int], first: int) -> list[str]:
    """The files that have KV of a block of the prompt from number `first` on."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    kv = make_kv(prompt, Span(0, len(prompt)))
    parts = [
        array[head, start : start + BLOCK_TOKENS].tobytes()
        for layer in kv.layers
        for array in (layer.keys, layer.values)
        for head in range(array.shape[0])
        for start in range(first * BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)
    ]
    return [path.name for path, data in files.items() if any(part in data for part in parts)]


# -- the law -----------------------------------------------------------------------------------------------------------


def paths(store: TieredStore) -> dict[int, list[bytes]]:
    """For each extent, the tokens from the root to the end of each of its blocks."""
    with store.disk.database.reading() as connection:
        rows = connection.execute("SELECT kv_space, key, parent, tokens, extent FROM blocks ORDER BY extent, place")
        blocks = {
            (kv_space, key): (parent, tokens, extent) for kv_space, key, parent, tokens, extent in rows.fetchall()
        }
    found: dict[int, list[bytes]] = {}
    for kv_space, key in blocks:
        path, above = b"", key
        while (kv_space, above) in blocks:
            path, above = blocks[kv_space, above][1] + path, blocks[kv_space, above][0]
        found.setdefault(blocks[kv_space, key][2], []).append(path)
    return found


def first_run(path: bytes, runs: Sequence[bytes]) -> int | None:
    """The first token of the first run in a path, token by token; a part of it at the end counts from eight on."""
    for start in range(len(path) // 4):
        for tokens in runs:
            part = path[start * 4 : start * 4 + len(tokens)]
            if part == tokens or (tokens.startswith(part) and len(part) // 4 >= MIN_TOKENS):
                return start
    return None


def expected(before: dict[int, list[bytes]], runs: Sequence[bytes]) -> set[bytes]:
    """The paths that stay. Where a chain was cut it ends anew, and there another run may begin."""
    while True:
        ends = [found[-1] for found in before.values() if found]
        gone = [path[: (start // 32 + 1) * 128] for path in ends if (start := first_run(path, runs)) is not None]
        if not gone:
            return {path for found in before.values() for path in found}
        before = {
            id: [path for path in found if not any(path.startswith(cut) for cut in gone)]
            for id, found in before.items()
        }


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=130)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin like each other, over three tokens; long stretches of one token, so that runs overlap."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        head: list[int] = []
        if prompts and draw(st.booleans()):
            older = draw(st.sampled_from(prompts))
            head = older[: draw(st.integers(0, len(older)))]
        rest = draw(st.one_of(tokens, st.builds(lambda a, n: [a] * n, st.integers(0, 2), st.integers(1, 100))))
        prompts.append(head + rest)
    return prompts


@settings(max_examples=30)
@given(trees(), st.data())
def test_no_chain_has_a_run_and_all_before_the_first_run_stays_to_the_bit(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    parts = st.sampled_from(prompts).flatmap(
        lambda prompt: st.builds(
            lambda start, count: prompt[start : start + count], st.integers(0, len(prompt) - 1), st.integers(4, 70)
        )
    )
    chosen = data.draw(st.lists(st.one_of(parts, st.lists(st.integers(0, 2), min_size=3, max_size=12)), max_size=3))
    runs = [token_bytes(tokens) for tokens in chosen]
    with tempfile.TemporaryDirectory() as folder, TieredStore(Path(folder) / "c", ROOMY) as store:
        for prompt in prompts:
            keep(store, prompt)
            keep(store, prompt, OTHER_TENANT)
        for row in store.disk.entries():
            if data.draw(st.integers(0, 5)) == 0:  # as eviction does, if nothing hangs on it
                with store.disk.database.writing() as connection:
                    catalog.cut(connection, row.id, max(1, row.live - 1))
        before = paths(store)
        others = {id for id, found in before.items() if _kv_space(store, id) != KV_SPACE.namespace.tenant}
        mine = {id: found for id, found in before.items() if id not in others}
        purged = purge(store, *chosen)
        after = paths(store)
        stay = expected(mine, runs)
        assert {path for id, found in after.items() if id not in others for path in found} == stay
        assert {id: after[id] for id in others} == {id: before[id] for id in others}
        assert purged.blocks == sum(map(len, mine.values())) - len(stay)
        for prompt in prompts:
            assert load(store, prompt, OTHER_TENANT) >= 1
            served = token_bytes(prompt[: load(store, prompt)])  # its end may be inside a block of another prompt
            assert not any(served[at:].startswith(tokens) for at in range(0, len(served), 4) for tokens in runs)
        assert check(store.disk).problems == ()
        for id, found in after.items():
            if id not in others:  # nor behind the live blocks of a file
                (row,) = [row for row in store.disk.entries() if row.id == id]
                held = found[0][: -len(store.disk.extents.tokens(row)[:128])] + store.disk.extents.tokens(row)
                assert first_run(held, runs) is None
        assert purge(store, *chosen).blocks == 0


def _kv_space(store: TieredStore, extent: int) -> str:
    with store.disk.database.reading() as connection:
        select = "SELECT s.tenant FROM extents e JOIN kv_spaces s ON s.id=e.kv_space WHERE e.id=?"
        return str(connection.execute(select, (extent,)).fetchone()[0])


@given(st.lists(st.tuples(tokens, st.integers(0, 40)), min_size=1, max_size=5), st.lists(tokens, max_size=4))
def test_many_runs_are_found_in_many_segments_as_one_by_one(
    segments: list[tuple[list[int], int]], runs: list[list[int]]
) -> None:
    given_runs = [token_bytes(tokens) for tokens in runs]
    found = TokenRuns(given_runs).first([Segment(token_bytes(tokens), own) for tokens, own in segments])
    for (tokens, own), start in zip(segments, found, strict=True):
        data = token_bytes(tokens)
        right = None
        for place in range(len(tokens)):
            for tokens_of_run in given_runs:
                part = data[place * 4 : place * 4 + len(tokens_of_run)]
                whole = part == tokens_of_run or (tokens_of_run.startswith(part) and len(part) >= MIN_TOKENS * 4)
                if whole and place + len(part) // 4 > own and right is None:
                    right = place
        assert start == right


# -- no trace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [ROOMY, KEYED], ids=["plain", "keyed"])
def test_no_byte_of_a_run_nor_of_its_kv_is_left_in_any_file(tmp_path: Path, settings: StoreSettings) -> None:
    folder, secret, head = tmp_path / "c", numbers(0, 75), numbers(1, 70)
    with TieredStore(folder, settings) as store:
        asked = [*head, *secret, *numbers(2, 50)]
        keep(store, numbers(3, 100))
        keep(store, head)
        keep(store, asked)
        keep(store, [*asked, *numbers(4, 200)])
        keep(store, [*numbers(5, 20), *secret[:40]])  # cut off by its end
        assert set(traces(folder, secret)) > {CATALOG + "-wal"} and kv_traces(folder, asked, 2)
        store.disk.pin(store.disk.entries())
        purged = purge(store, secret)
        assert traces(folder, secret) == [] and kv_traces(folder, asked, 2) == []
        assert kv_traces(folder, [*numbers(5, 20), *secret[:40]], 0) == []
        assert [load(store, numbers(3, 100)), load(store, asked)] == [100, 64]
        assert load(store, [*numbers(5, 20), *secret]) == 0
        assert check(store.disk).problems == ()
        assert (purged.blocks, purged.extents) == (13, 3)
        assert keep(store, asked).outcome == "kept" and load(store, asked) == len(asked)


def test_nothing_is_left_where_the_catalog_moved_its_rows_about(tmp_path: Path) -> None:
    """Deleting alone, even with zeroes, leaves copies of rows in pages that were balanced."""
    rng = random.Random(1)
    parts = {number: [rng.randbytes(128) for _ in range(rng.randrange(1, 6))] for number in range(10, 3010)}
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, [1, 2, 3])
        for first in range(10, 3010, 10):
            with store.disk.database.writing() as connection:
                for number in range(first, first + 10):
                    _list(connection, number, parts[number], rng)
        secrets = [part for number in range(10, 3010, 7) for part in parts[number]]
        assert store.purge("local", "", [TokenRun("words", secret) for secret in secrets]).blocks == len(secrets)
        left = (tmp_path / "c" / CATALOG).read_bytes()
        assert not [secret for secret in secrets if secret[:32] in left or secret[-32:] in left]
        assert sum(part in left for number in range(11, 3010, 7) for part in parts[number]) > 1000


def _list(connection: sqlite3.Connection, number: int, parts: list[bytes], rng: random.Random) -> None:
    """Rows of an extent without a file, under keys that chain but mean nothing."""
    connection.execute(
        "INSERT INTO extents (id, name, kv_space, state, bytes, writer, blocks, live) VALUES (?,?,1,'live',0,'',?,?)",
        (number, str(number), len(parts), len(parts)),
    )
    above = rng.randbytes(16)
    for place, part in enumerate(parts):
        key = rng.randbytes(16)
        row = (number, place, 1, key, above, part, 0.0)
        connection.execute("INSERT INTO blocks VALUES (?,?,?,?,?,?,?,0)", row)
        above = key


def test_what_eviction_left_in_a_file_or_in_the_catalog_goes_too(tmp_path: Path) -> None:
    folder, secret = tmp_path / "c", numbers(0, 60)
    asked = [*numbers(1, 200), *secret]
    with TieredStore(folder, ROOMY) as store:
        keep(store, asked)
        keep(store, secret)
        with store.disk.database.writing() as connection:
            for row, live in zip(store.disk.entries(), (6, 0), strict=True):
                catalog.cut(connection, row.id, live)
        store.disk.room.sweep()
        assert traces(folder, secret)
        assert purge(store, secret).blocks == 0
        assert traces(folder, secret) == [] and kv_traces(folder, asked, 6) == []
        assert load(store, asked) == 192


def test_set_aside_catalogs_and_strays_go(tmp_path: Path) -> None:
    folder, secret = tmp_path / "c", numbers(0, 60)
    with TieredStore(folder, ROOMY) as store:
        keep(store, secret)
        store.disk.database.discard()
        keep(store, numbers(1, 10))
        (folder / "extents" / "0123456789abcdef.kv").write_bytes(token_bytes(secret))
        purge(store, secret)
        assert traces(folder, secret) == []


def test_under_another_key_whole_files_go(tmp_path: Path) -> None:
    folder, secret = tmp_path / "c", numbers(0, 60)
    with TieredStore(folder, KEYED) as store:
        keep(store, [*numbers(1, 64), *secret])
        keep(store, numbers(2, 64))
        keep(store, [*numbers(2, 64), 1])
    with TieredStore(folder, ROOMY) as store:
        purge(store, secret)
    assert traces(folder, secret) == []
    with TieredStore(folder, KEYED) as store:
        assert load(store, numbers(1, 64)) == 0 and load(store, [*numbers(2, 64), 1]) == 65
        assert check(store.disk).problems == ()


# -- what goes, what stays ---------------------------------------------------------------------------------------------


def test_where_there_is_no_room_for_a_copy_the_whole_file_goes(tmp_path: Path) -> None:
    folder, secret = tmp_path / "c", numbers(0, 60)
    with TieredStore(folder, replace(ROOMY, write_budget=1 << 20)) as store:
        keep(store, [*numbers(1, 640), *secret])
        with store.disk.database.writing() as connection:
            store.disk.room.add_written(connection, 1 << 20)
        purge(store, secret)
        assert traces(folder, secret) == [] and load(store, numbers(1, 640)) == 0
        assert check(store.disk).problems == ()


def test_the_limit_holds_while_a_full_cache_is_purged(tmp_path: Path) -> None:
    limit = (2 << 20) + 400_000
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=limit, memory_limit=0)) as store:
        for number in range(8):
            keep(store, [*numbers(number, 640), *numbers(99, 60)])
        purge(store, numbers(99, 60))
        assert sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file()) <= limit
        assert sum(load(store, numbers(number, 640)) > 0 for number in range(8)) >= 2
        assert traces(tmp_path / "c", numbers(99, 60)) == [] and check(store.disk).problems == ()


def test_other_tenants_and_other_salts_keep_theirs(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for kv_space in (KV_SPACE, OTHER_TENANT, OTHER_SALT):
            keep(store, numbers(0, 60), kv_space)
        purge(store, numbers(0, 60))
        assert [load(store, numbers(0, 60), kv_space) for kv_space in (KV_SPACE, OTHER_TENANT, OTHER_SALT)] == [
            0,
            60,
            60,
        ]


def test_a_run_counts_for_its_tokenizer_and_where_that_was_never_noted(tmp_path: Path) -> None:
    words = Identity("weights", "config", "words", "template", "float16", "rope")
    bytes_, unknown = replace(words, tokenizer="bytes"), replace(words, tokenizer="bytes", config="other")
    kv_spaces = [KvSpace(Namespace(identity.digest), SMALL) for identity in (words, bytes_, unknown)]
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for kv_space, identity in zip(kv_spaces, (words, bytes_, unknown), strict=True):
            keep(store, numbers(0, 60), kv_space)
            if identity is not unknown:
                store.note(kv_space, identity, numbers(0, 60), b"", {})
        assert purge(store, numbers(0, 60)).requests == 1
        assert [load(store, numbers(0, 60), kv_space) for kv_space in kv_spaces] == [0, 60, 0]
        assert len(history.recent(store.disk, kv_spaces[1])) == 1


def test_what_is_pinned_above_a_run_stays_pinned_and_what_hung_on_it_holds_nothing(tmp_path: Path) -> None:
    head = numbers(1, 64)
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, head)
        keep(store, [*head, *numbers(0, 60)])
        store.disk.pin(store.disk.entries()[1:])
        assert [row.pinned for row in store.disk.entries()] == [2, 1]
        purge(store, numbers(0, 60))
        assert [(row.tokens, row.pinned) for row in store.disk.entries()] == [(64, 0)]


def test_an_empty_run_is_refused_and_no_run_does_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="at least one"):
        run([])
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, numbers(0, 60))
        assert purge(store).blocks == 0
        assert load(store, numbers(0, 60)) == 60


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, numbers(0, 100))
        keep(store, numbers(1, 100))
        store.purge("local", "", [run(numbers(2, 9))], progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (8, 8)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_lets_go_and_other_processes_find_nothing_though_they_hold_it(tmp_path: Path) -> None:
    with_memory = replace(ROOMY, memory_limit="10MB")
    asked = [*numbers(1, 64), *numbers(0, 60)]
    with TieredStore(tmp_path / "c", with_memory) as store, TieredStore(tmp_path / "c", with_memory) as other:
        keep(other, asked)
        match = other.lookup(KV_SPACE, asked)
        assert other.holds(match.pieces[0]) and match.length == 124
        keep(store, numbers(3, 40))
        purge(store, numbers(0, 60))
        assert len(store.memory) == 0
        assert [load(one, asked) for one in (store, other)] == [64, 64]
        other.maintain()
        assert len(other.memory) <= 1 and not other.holds(match.pieces[0])


# -- history -----------------------------------------------------------------------------------------------------------

SECRET = "The blue heron nests behind the old mill.\nNobody but Ada knows the way there, not even the miller.\n"


@pytest.mark.parametrize(
    ("quote", "goes"),
    [
        (SECRET, True),
        ("Ada knows the way there, not", True),
        (visible("nests behind the old mill.\nNobody"), True),
        ('{"text": "Nobody but Ada knows\\nthe way there"}', True),
        ("the old mill", False),
        ("a question about something else entirely", False),
    ],
)
def test_requests_that_quote_a_text_are_forgotten(tmp_path: Path, quote: str, goes: bool) -> None:
    identity = Identity("weights", "config", "words", "template", "float16", "rope")
    with TieredStore(tmp_path / "c", ROOMY) as store:
        store.note(KV_SPACE, identity, [1, 2, 3], b"", {"difference": {"known": quote}, "parts": [{"entry": None}]})
        store.note(OTHER_TENANT, identity, [1, 2, 3], b"", {"known": quote})
        assert purge(store, texts=[SECRET]).requests == goes
        assert len(history.recent(store.disk, KV_SPACE)) == 1 - goes
        assert len(history.recent(store.disk, OTHER_TENANT)) == 1


def test_a_forgotten_request_leaves_no_trace(tmp_path: Path) -> None:
    identity = Identity("weights", "config", "words", "template", "float16", "rope")
    secret = numbers(0, 300)
    with TieredStore(tmp_path / "c", ROOMY) as store:
        store.note(KV_SPACE, identity, [*numbers(1, 950), *secret], b"", {"known": visible(SECRET)})
        store.note(KV_SPACE, identity, numbers(2, 3000), b"", {"known": "else"})
        assert traces(tmp_path / "c", secret)
        assert purge(store, secret).requests == 1
        assert traces(tmp_path / "c", secret) == []
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"heron" in p.read_bytes()]
        assert len(history.recent(store.disk, KV_SPACE)) == 1


def test_short_texts_must_be_there_as_a_whole() -> None:
    assert Snippets(["Heron 7"]).quoted(['{"a": ["the heron·7 is"]}', '{"a": "heron"}', "no JSON"]) == [
        True,
        False,
        True,
    ]
    assert Snippets([]).quoted(['{"a": "anything at all"}']) == [False]


# -- others ------------------------------------------------------------------------------------------------------------


def test_while_another_process_reads_the_log_cannot_be_emptied_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.store.catalog.database._CUT_ATTEMPTS", 2)
    secret = numbers(0, 60)
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, secret)
        with closing(sqlite3.connect(tmp_path / "c" / CATALOG, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM blocks").fetchone()
            with pytest.raises(CacheUnusable, match="Run it again"):
                purge(store, secret)
            assert load(store, secret) == 0
        purge(store, secret)
        assert traces(tmp_path / "c", secret) == []
