"""Laws of the store, driven at random against a plain dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.core.keys import BLOCK_TOKENS, KvSpace, Namespace
from rekindle.core.kv import Span
from rekindle.core.scope import APP_STATES, AppRef, AppState, Scope
from rekindle.core.size import human_bytes, parse_limit
from rekindle.store.catalog import app_rows
from rekindle.store.check import check
from rekindle.store.evict import POLICIES
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, SMALL, keep, load

OTHER = KvSpace(Namespace("test-model", tenant="somebody else"), SMALL)


def common(a: list[int], b: list[int]) -> int:
    """Tokens that two prompts share from the start."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


class StoreMachine(RuleBasedStateMachine):
    """Keep, lookup, load, evict, pin, crash and reopen, against the list of what was kept.

    `kept` are the prompts that must be known exactly; `ever` all that were kept at any time. Nothing may be found
    that was never kept; until something is evicted, everything kept must be found, to the token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rekindle-laws-"))
        self.kept: dict[KvSpace, list[list[int]]] = {KV_SPACE: [], OTHER: []}
        self.ever: dict[KvSpace, list[list[int]]] = {KV_SPACE: [], OTHER: []}
        self.pinned: list[list[int]] = []
        self.limit = 0
        self.now = 1_000_000.0

    @initialize(memory=st.sampled_from([0, 20_000, 10_000_000]), policy=st.sampled_from(list(POLICIES)))
    def open(self, memory: int, policy: str) -> None:
        self.limit = 50_000_000
        self.memory = memory
        self.policy = policy
        self.store = self._open()

    def _open(self) -> TieredStore:
        settings = StoreSettings(disk_limit=self.limit, memory_limit=self.memory, policy=self.policy)
        return TieredStore(self.folder / "cache", settings)

    def _prompt(self, data: st.DataObject, kv_space: KvSpace) -> list[int]:
        """A prompt that begins like an older one, for some tokens."""
        older = self.ever[kv_space]
        head: list[int] = []
        if older and data.draw(st.booleans(), "begins like an older one"):
            head = data.draw(st.sampled_from(older))
            head = head[: data.draw(st.integers(0, len(head)), "shared")]
        tail = data.draw(st.integers(0, 100), "new")
        seed = data.draw(st.integers(0, 3), "tail")
        return head + [seed + place % 3 for place in range(tail)]

    def _known(self, kv_space: KvSpace, tokens: list[int], among: dict[KvSpace, list[list[int]]]) -> int:
        return max((common(tokens, other) for other in among[kv_space]), default=0)

    @rule(data=st.data(), kv_space=st.sampled_from([KV_SPACE, OTHER]), app=st.sampled_from([None, "mail", "notes"]))
    def keep(self, data: st.DataObject, kv_space: KvSpace, app: str | None) -> None:
        tokens = self._prompt(data, kv_space)
        app_ref = None if app is None else AppRef(kv_space.namespace.tenant, app)
        outcome = keep(self.store, tokens, kv_space, app_ref).outcome
        self.store.record_request(kv_space, tokens, app_ref)
        assert outcome in ("kept", "known")
        if tokens:
            self.kept[kv_space].append(tokens)
            self.ever[kv_space].append(tokens)

    @rule(data=st.data(), kv_space=st.sampled_from([KV_SPACE, OTHER]))
    def look_up_and_load(self, data: st.DataObject, kv_space: KvSpace) -> None:
        tokens = self._prompt(data, kv_space)
        found = load(self.store, tokens, kv_space)  # compares every number
        assert found <= self._known(kv_space, tokens, self.ever)
        assert found >= self._known(kv_space, tokens, self.kept)
        gap = self.store.lookup(kv_space, tokens).gap()
        whole = found // BLOCK_TOKENS * BLOCK_TOKENS
        assert gap == (None if found == len(tokens) else Span(whole, len(tokens)))
        self.store.record_use(self.store.lookup(kv_space, tokens), saved_ms=2.0)

    @rule(app=st.sampled_from(["mail", "notes"]), state=st.sampled_from(APP_STATES))
    def say_of_an_app(self, app: str, state: AppState) -> None:
        disk = self.store.disk
        with disk.database.writing() as connection:
            app_rows.set_state(connection, Scope("local"), app, state, disk.clock(), disk.room.allows)

    @rule()
    def maintain(self) -> None:
        self.store.maintain()

    @rule()
    def close_and_reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    @rule()
    def crash_and_reopen(self) -> None:
        self.store = self._open()  # the old one is left as a killed process leaves it

    @precondition(lambda self: self.kept[KV_SPACE])
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(self.kept[KV_SPACE]))
        match = self.store.lookup(KV_SPACE, tokens)
        rows = {row.id: row for row in self.store.disk.entries()}
        self.store.disk.pin([rows[piece.extent] for piece in match.pieces])
        self.pinned.append(tokens)

    @rule(share=st.sampled_from([0.0, 0.3, 0.7]))
    def evict(self, share: float) -> None:
        before = sum(row.size_bytes for row in self.store.disk.entries())
        catalog = self.store.disk.database.size_bytes()
        self.store.disk.room.prune(catalog + int(before * share))
        for kv_space, prompts in self.kept.items():
            survivors = []
            for tokens in prompts:
                found = load(self.store, tokens, kv_space)
                survivors.append(tokens[:found])
            self.kept[kv_space] = [tokens for tokens in survivors if tokens]
        for tokens in self.pinned:
            assert self.store.lookup(KV_SPACE, tokens).length == len(tokens)

    @precondition(lambda self: self.store.disk.entries())
    @rule(data=st.data())
    def remove_an_entry(self, data: st.DataObject) -> None:
        rows = [row for row in self.store.disk.entries() if not row.pinned]
        if rows:
            chosen = data.draw(st.sampled_from(rows)).id
            self.store.disk.evict(lambda row: row.id == chosen)
            self.evict(1.0)

    @invariant()
    def every_promise_of_the_catalog_holds(self) -> None:
        if hasattr(self, "store"):
            assert check(self.store.disk).problems == ()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 200), min_size=6, max_size=6),
)
def test_a_prefix_is_found_to_the_token_however_it_was_kept(lengths: list[int], cuts: list[int]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rekindle-laws-"))
    try:
        with TieredStore(folder / "cache", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
            kept: list[list[int]] = []
            for number, (length, cut) in enumerate(zip(lengths, cuts, strict=False)):
                tokens = (kept[-1][:cut] if kept else []) + [number * 1000 + place for place in range(length)]
                assert keep(store, tokens).outcome in ("kept", "known")
                kept.append(tokens)
                for known in kept:
                    for stop in {len(known), len(known) // 2, cut}:
                        question = [*known[:stop], 999_999]
                        wanted = max(common(question, other) for other in kept)
                        assert load(store, question) == wanted
    finally:
        shutil.rmtree(folder)


@given(count=st.integers(0, 10**15))
def test_a_size_that_people_read_is_a_size_that_people_may_write(count: int) -> None:
    again = parse_limit(human_bytes(count)).size_bytes
    assert again is not None and abs(again - count) <= 0.06 * count + 1
