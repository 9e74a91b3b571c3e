"""The plans of the scheduler's side, carried out by the worker's side in one store: vLLM itself is not needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fleet.tier_servers import FaultyLink
from rekindle.cache.cost import Costs, Rates
from rekindle.core.kv import KvLayout, LayerShape, Span
from rekindle.settings import Settings
from rekindle.store.redis import RedisObjects
from rekindle.store.tiered import TieredStore
from rekindle.vllm.block_planner import BlockPlanner
from rekindle.vllm.block_store import BlockStore
from rekindle.vllm.paged_kv import PagedLayer
from rekindle.vllm.served_model import ServedLayer, ServedLayers, VllmModel
from rekindle.vllm.step_plan import StepPlan, WorkerReport
from tests.tier_servers import RedisServer, redis_server
from tests.unmeasured_costs import UnmeasuredCosts

SIZE, BLOCKS = 32, 64
SHAPE = LayerShape(2, 8, 8)
NAMES = ("model.layers.0.attn", "model.layers.1.attn")
LAYERS = ServedLayers(tuple(ServedLayer(name, 0, SHAPE) for name in NAMES), (SIZE,), "float32")
PATIENCE_SECONDS = 60.0


@dataclass
class AskedRequest:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None


class FixedCosts(Costs):
    """Costs that are what they are, however long a step takes here, and were measured for loads of these tokens."""

    def __init__(self, rates: Rates, *tokens: int) -> None:
        super().__init__(rates)
        super().computed(Span(0, 100), rates.compute_seconds(Span(0, 100)))
        for size_bytes in [count * LAYERS.layout.token_bytes for count in tokens] * 3:
            self.loaded("disk", size_bytes, rates.load_seconds("disk", size_bytes))

    def computed(self, span: Span, seconds: float) -> None: ...


class Fleet:
    """A planner, a worker and vLLM's memory, in one process."""

    def __init__(self, folder: Path, costs: Costs | None = None, redis: str | None = None, **options: Any) -> None:
        self.stored: list[tuple[str, Span]] = []
        model = VllmModel("identity", "tiny", LAYERS.layout, 1, costs or UnmeasuredCosts())
        settings = Settings.load({"cache": str(folder)})
        note = lambda request, span: self.stored.append((request.request_id, span))  # noqa: E731
        planning, working = (
            TieredStore(folder, shared=[] if redis is None else [RedisObjects(redis, 64 << 20)]) for _ in range(2)
        )
        self.planner = BlockPlanner(planning, model, settings, on_stored=note, **options)
        self.worker = BlockStore(working, LAYERS, 0, 1)
        torch.manual_seed(0)
        self.memory = {layer.name: PagedLayer(*torch.randn(2, BLOCKS, 2, SIZE, 8)) for layer in LAYERS.layers}
        self.worker.register(self.memory)

    def step(self, scheduled: dict[str, int], tables: dict[str, tuple[int, ...]]) -> StepPlan:
        plan = self.planner.step(scheduled, lambda request_id: (tables[request_id],))
        self.worker.start_loads(plan)
        for layer in LAYERS.layers if scheduled else ():
            self.worker.wait_for_layer(layer.name)
            self.worker.copy_layer(layer.name, plan.saves)
        self.worker.finish_saves(plan.saves)
        assert self.worker.flush(PATIENCE_SECONDS)
        self.planner.report(self.worker.take_report())
        return plan

    def close(self) -> None:
        self.worker.close()
        self.planner.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path / "kv")
    yield made
    made.close()


def asked(name: str, length: int, **more: Any) -> AskedRequest:
    return AskedRequest(name, list(range(1, length + 1)), length, **more)


def run_prompt(fleet: Fleet, request: AskedRequest, blocks: tuple[int, ...], chunk: int = 1000) -> list[StepPlan]:
    """Compute a prompt in chunks, as vLLM's scheduler does."""
    fleet.planner.matched(request, 0)
    fleet.planner.admitted(request, (blocks,), 0)
    plans = []
    while request.num_computed_tokens < request.num_prompt_tokens:
        count = min(chunk, request.num_prompt_tokens - request.num_computed_tokens)
        plans.append(fleet.step({request.request_id: count}, {request.request_id: blocks}))
        request.num_computed_tokens += count
    return plans


def loaded(fleet: Fleet) -> tuple[set[str], set[str]]:
    """Wait until a load has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        ended, failed = fleet.worker.finished_loads()
        if ended:
            return ended, failed
        time.sleep(0.01)
    raise AssertionError("no load has ended")


def test_a_prompt_is_saved_and_loaded_into_other_blocks(fleet: Fleet) -> None:
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    again = asked("again", 100)
    assert fleet.planner.matched(again, 0) == 99
    fleet.planner.admitted(again, ((20, 21, 22, 23),), 99)
    fleet.step({}, {})
    assert loaded(fleet) == ({"again"}, set())
    for paged in fleet.memory.values():
        was, now = paged.read((3, 9, 4, 7), SIZE, Span(0, 99)), paged.read((20, 21, 22, 23), SIZE, Span(0, 99))
        assert (was.keys == now.keys).all()
        assert (was.values == now.values).all()


def test_only_what_vllm_lacks_is_loaded(fleet: Fleet) -> None:
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    before = fleet.memory["model.layers.0.attn"].read((20, 21), SIZE, Span(0, 64))
    again = asked("again", 100)
    assert fleet.planner.matched(again, 64) == 35
    fleet.planner.admitted(again, ((20, 21, 22, 23),), 35)
    fleet.step({}, {})
    loaded(fleet)
    paged = fleet.memory["model.layers.0.attn"]
    assert (paged.read((20, 21), SIZE, Span(0, 64)).keys == before.keys).all()
    assert (paged.read((22, 23), SIZE, Span(0, 35)).keys == paged.read((4, 7), SIZE, Span(0, 35)).keys).all()


def test_a_prompt_in_chunks_is_saved_by_whole_blocks_and_to_its_end(fleet: Fleet) -> None:
    plans = run_prompt(fleet, asked("first", 100), (3, 9, 4, 7), chunk=40)
    assert [save.span for plan in plans for save in plan.saves] == [Span(0, 32), Span(32, 64), Span(64, 100)]
    assert fleet.stored == [("first", Span(0, 32)), ("first", Span(32, 64)), ("first", Span(64, 100))]
    assert fleet.planner.matched(asked("again", 200), 0) == 100


def test_what_is_stored_is_not_saved_again(fleet: Fleet) -> None:
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    longer = asked("longer", 160)
    plans = run_prompt(fleet, longer, (20, 21, 22, 23, 24))
    assert [save.span for plan in plans for save in plan.saves] == [Span(96, 160)]


def test_a_reply_is_saved_when_it_ends(fleet: Fleet) -> None:
    request = asked("first", 100)
    run_prompt(fleet, request, (3, 9, 4, 7))
    request.all_token_ids += range(500, 540)
    request.num_computed_tokens = 139
    assert fleet.planner.finished(request, ((3, 9, 4, 7, 8),))
    plan = fleet.planner.step({}, lambda _: ())
    assert fleet.worker.finish_saves(plan.saves) == {"first"}
    assert fleet.worker.flush(PATIENCE_SECONDS)
    longer = AskedRequest("longer", [*request.all_token_ids, 7, 8, 9], 143)
    assert fleet.planner.matched(longer, 0) == 139


@pytest.mark.parametrize("new", [1, 20])
def test_less_than_a_block_of_a_reply_is_not_written(fleet: Fleet, new: int) -> None:
    request = asked("first", 100)
    run_prompt(fleet, request, (3, 9, 4, 7))
    request.all_token_ids += range(500, 500 + new)
    request.num_computed_tokens = 99 + new
    assert not fleet.planner.finished(request, ((3, 9, 4, 7, 8),))


def test_a_load_that_failed_is_not_tried_again(fleet: Fleet, tmp_path: Path) -> None:
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    other = TieredStore(tmp_path / "kv")
    again = asked("again", 100)
    assert fleet.planner.matched(again, 0) == 99
    other.clear()
    other.close()
    fleet.planner.admitted(again, ((20, 21, 22, 23),), 99)
    fleet.step({}, {})
    assert loaded(fleet) == ({"again"}, {"again"})
    assert fleet.worker.take_failed_blocks() == {20, 21, 22, 23}
    run_prompt(fleet, asked("second", 100), (3, 9, 4, 7))  # there it is again
    assert fleet.planner.matched(again, 0) == 0
    again.num_preemptions = 1
    assert fleet.planner.matched(again, 0) == 99


def test_nothing_computed_after_a_failed_load_by_layers_is_kept(tmp_path: Path) -> None:
    """The step that needed it runs on, with what the blocks held; so do steps that were scheduled already."""
    fleet = Fleet(tmp_path / "kv", by_layer=True)
    run_prompt(fleet, asked("first", 64), (3, 9))
    longer = asked("longer", 160)
    assert fleet.planner.matched(longer, 0) == 64
    fleet.planner.admitted(longer, ((20, 21, 22, 23, 24),), 64)
    longer.num_computed_tokens = 64
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    fleet.worker.close()  # a worker that has nothing in memory
    fleet.worker = BlockStore(TieredStore(tmp_path / "kv"), LAYERS, 0, 1)
    fleet.worker.register(fleet.memory)
    fleet.step({"longer": 96}, {"longer": (20, 21, 22, 23, 24)})
    assert fleet.worker.finished_loads() == (set(), set())
    assert fleet.worker.take_failed_blocks() == {20, 21}
    assert fleet.worker.take_counts() == {"failed_loads": 1, "dropped_saves": 1}
    assert not fleet.planner.writing  # nobody waits for what was dropped
    fleet.close()


def test_salts_and_requests_with_images_find_nothing(fleet: Fleet) -> None:
    run_prompt(fleet, asked("first", 100, cache_salt="anna"), (3, 9, 4, 7))
    assert fleet.planner.matched(asked("own", 100, cache_salt="anna"), 0) == 99
    assert fleet.planner.matched(asked("none", 100), 0) == 0
    assert fleet.planner.matched(asked("other", 100, cache_salt="ben"), 0) == 0
    assert fleet.planner.matched(asked("image", 100, cache_salt="anna", mm_features=[object()]), 0) == 0


def test_whole_blocks_where_loads_must_end_with_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "kv", whole=SIZE)
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    assert fleet.planner.matched(asked("again", 100), 0) == 96
    fleet.close()


def test_what_computes_faster_is_not_loaded(tmp_path: Path) -> None:
    slow = Rates((0.0, 1e-6, 0.0), {"memory": (1.0, 0.0), "disk": (1.0, 0.0), "coded": (1.0, 0.0)})
    fleet = Fleet(tmp_path / "kv", FixedCosts(slow, 99))
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    assert fleet.planner.matched(asked("again", 100), 0) == 0
    assert fleet.planner.take_counts() == {"refused_loads": 1}
    fleet.close()


def test_a_token_that_saves_no_step_is_not_loaded(tmp_path: Path) -> None:
    """The weights are read for the rest of the prompt anyway."""
    rates = Rates((10.0, 1e-3, 0.0), {"memory": (5e-3, 0.0), "disk": (5e-3, 0.0), "coded": (5e-3, 0.0)})
    fleet = Fleet(tmp_path / "kv", FixedCosts(rates, 1, 99))
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    assert fleet.planner.matched(AskedRequest("other", [1, *range(500, 599)], 100), 0) == 0
    assert fleet.planner.matched(asked("again", 100), 0) == 99
    fleet.close()


def test_a_reset_removes_what_was_stored_and_queued(fleet: Fleet) -> None:
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    late = asked("late", 200)
    fleet.planner.matched(late, 0)
    plan = fleet.planner.step({"late": 200}, lambda _: (tuple(range(30, 37)),))
    assert fleet.planner.reset()
    fleet.worker.finish_saves(plan.saves)  # the step was under way
    fleet.step({}, {})
    assert fleet.planner.matched(asked("again", 200), 0) == 0


def test_a_reply_that_ended_before_a_reset_is_not_stored_but_its_blocks_go(fleet: Fleet) -> None:
    request = asked("first", 100)
    run_prompt(fleet, request, (3, 9, 4, 7))
    request.all_token_ids += range(500, 540)
    request.num_computed_tokens = 139
    assert fleet.planner.finished(request, ((3, 9, 4, 7, 8),))
    assert fleet.planner.reset()
    plan = fleet.planner.step({}, lambda _: ())
    fleet.worker.start_loads(plan)
    assert fleet.worker.finish_saves(plan.saves) == {"first"}
    assert fleet.worker.flush(PATIENCE_SECONDS)
    assert fleet.planner.matched(AskedRequest("longer", [*request.all_token_ids, 7], 141), 0) == 0
    run_prompt(fleet, asked("next", 100), (3, 9, 4, 7))
    assert fleet.planner.matched(asked("again", 100), 0) == 99


def test_workers_hold_a_part_of_the_heads_each(tmp_path: Path) -> None:
    """What one of them lost, none of them loads."""
    model = VllmModel("identity", "tiny", LAYERS.layout, 2, UnmeasuredCosts())
    planner = BlockPlanner(TieredStore(tmp_path / "kv"), model, Settings.load({"cache": str(tmp_path / "kv")}))
    workers = [BlockStore(TieredStore(tmp_path / "kv"), LAYERS, rank, 2) for rank in (0, 1)]
    for worker in workers:
        worker.register({layer.name: PagedLayer(*torch.randn(2, BLOCKS, 2, SIZE, 8)) for layer in LAYERS.layers})
    planner.matched(asked("first", 100), 0)
    plan = planner.step({"first": 100}, lambda _: ((3, 9, 4, 7),))
    workers[0].finish_saves(plan.saves)
    assert workers[0].flush(PATIENCE_SECONDS)
    assert planner.matched(asked("again", 100), 0) == 0
    workers[1].finish_saves(plan.saves)
    assert workers[1].flush(PATIENCE_SECONDS)
    assert planner.matched(asked("again", 100), 0) == 99
    for closing in (*workers, planner):
        closing.close()


def test_reports_of_workers_are_added_up() -> None:
    one, other = WorkerReport(load_times=[("disk", 1, 0.5)]), WorkerReport(unusable="no layout")
    one.saved[4] += 1
    other.saved[4] += 1
    both = one.aggregate(other)
    assert (both.saved[4], both.load_times, both.unusable) == (2, [("disk", 1, 0.5)], "no layout")


def test_a_worker_without_a_layout_stops_the_planner(fleet: Fleet) -> None:
    fleet.worker.register({})
    fleet.step({}, {})
    assert fleet.planner.unusable is not None
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    assert fleet.planner.matched(asked("again", 100), 0) == 0


def test_a_layout_is_that_of_all_layers() -> None:
    assert LAYERS.layout == KvLayout("float32", (SHAPE, SHAPE))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def test_another_server_loads_what_is_on_a_shared_tier(redis: RedisServer, tmp_path: Path) -> None:
    one, other = (Fleet(tmp_path / name, redis=redis.url) for name in ("one", "other"))
    run_prompt(one, asked("first", 100), (3, 9, 4, 7))
    again = asked("again", 100)
    assert other.planner.matched(again, 0) == 99
    other.planner.admitted(again, ((20, 21, 22, 23),), 99)
    other.step({}, {})
    assert loaded(other) == ({"again"}, set())
    for name, paged in one.memory.items():
        was = paged.read((3, 9, 4, 7), SIZE, Span(0, 99))
        now = other.memory[name].read((20, 21, 22, 23), SIZE, Span(0, 99))
        assert (was.keys == now.keys).all() and (was.values == now.values).all()
    one.close()
    other.close()


def test_what_came_from_a_shared_tier_is_then_in_the_folder(redis: RedisServer, tmp_path: Path) -> None:
    """Behind what the folder had: the tier is not asked again."""
    one, other = (Fleet(tmp_path / name, redis=redis.url) for name in ("one", "other"))
    tokens = list(range(2000, 2400))
    first, second, third = (tuple(range(start, start + 13)) for start in (3, 20, 40))
    run_prompt(other, AskedRequest("begin", tokens[:40], 40), first)
    run_prompt(one, AskedRequest("first", tokens, 400), first)
    again = AskedRequest("again", tokens, 400)
    assert other.planner.matched(again, 0) == 399
    other.planner.admitted(again, (second,), 399)
    other.step({}, {})
    assert loaded(other) == ({"again"}, set())
    assert other.worker.flush(PATIENCE_SECONDS)
    other.close()
    alone = Fleet(tmp_path / "other")  # without the tier
    later = replace(again, request_id="later")
    assert alone.planner.matched(later, 0) == 399
    alone.planner.admitted(later, (third,), 399)
    alone.step({}, {})
    assert loaded(alone) == ({"later"}, set())
    for name, paged in one.memory.items():
        was = paged.read(first, SIZE, Span(0, 399))
        now = alone.memory[name].read(third, SIZE, Span(0, 399))
        assert (was.keys == now.keys)[:, 32:].all() and (was.values == now.values)[:, 32:].all()
    one.close()
    alone.close()


def test_a_short_beginning_from_a_shared_tier_is_saved_with_the_rest_in_one_piece(
    redis: RedisServer, tmp_path: Path
) -> None:
    one, other = (Fleet(tmp_path / name, redis=redis.url) for name in ("one", "other"))
    run_prompt(one, AskedRequest("first", list(range(4000, 4100)), 100), (3, 9, 4, 7))
    tokens = [*range(4000, 4040), *range(5000, 5060)]
    second = AskedRequest("second", tokens, 100)
    assert other.planner.matched(second, 0) == 40
    other.planner.admitted(second, ((20, 21, 22, 23),), 40)
    other.step({}, {})
    assert loaded(other) == ({"second"}, set())
    second.num_computed_tokens = 40
    plan = other.step({"second": 60}, {"second": (20, 21, 22, 23)})
    assert [save.span for save in plan.saves] == [Span(0, 100)]
    other.close()
    alone = Fleet(tmp_path / "other")  # without the tier
    later = replace(second, request_id="later", num_computed_tokens=0)
    assert alone.planner.matched(later, 0) == 99
    assert len(list((tmp_path / "other").rglob("*.kv"))) == 1
    alone.planner.admitted(later, ((30, 31, 32, 33),), 99)
    alone.step({}, {})
    assert loaded(alone) == ({"later"}, set())
    for name, paged in one.memory.items():
        was = paged.read((3, 9), SIZE, Span(0, 40))
        now = alone.memory[name].read((30, 31), SIZE, Span(0, 40))
        assert (was.keys == now.keys).all() and (was.values == now.values).all()
    one.close()
    alone.close()


def test_a_short_beginning_is_copied_by_itself_where_vllm_drops_what_lies_before_a_window(tmp_path: Path) -> None:
    for whole, copied in ((1, False), (SIZE, True)):
        fleet = Fleet(tmp_path / str(whole), whole=whole)
        run_prompt(fleet, asked("first", 96), (3, 9, 4))
        request = asked("again", 128)
        assert fleet.planner.matched(request, 0) == 96
        fleet.planner.admitted(request, ((20, 21, 22, 23),), 96)
        assert [load.copied for load in fleet.step({}, {}).loads] == [copied]
        assert loaded(fleet) == ({"again"}, set())
        fleet.close()


def test_what_is_damaged_on_a_shared_tier_is_computed(redis: RedisServer, tmp_path: Path) -> None:
    import redis as redis_client

    one, other = (Fleet(tmp_path / name, redis=redis.url) for name in ("one", "other"))
    with redis_client.Redis.from_url(redis.url) as server:
        server.flushall()
        run_prompt(one, asked("first", 100), (3, 9, 4, 7))
        extents = [key for key in server.scan_iter("*") if server.type(key) == b"string" and server.strlen(key) > 4096]
        assert extents
        for key in extents:
            server.setrange(key, 4000, b"damaged!")
    again = asked("again", 100)
    assert other.planner.matched(again, 0) == 99
    other.planner.admitted(again, ((20, 21, 22, 23),), 99)
    other.step({}, {})
    assert loaded(other) == ({"again"}, {"again"})
    assert other.worker.take_failed_blocks() == {20, 21, 22, 23}
    one.close()
    other.close()


def test_a_shared_tier_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "kv", redis="redis://127.0.0.1:1/0")
    run_prompt(fleet, asked("first", 100), (3, 9, 4, 7))
    assert fleet.planner.matched(asked("again", 100), 0) == 99  # of its own folder
    assert fleet.planner.matched(AskedRequest("new", [7] * 100, 100), 0) == 0
    fleet.close()


@pytest.mark.parametrize("hangs", ["lookup", "load"])
def test_a_shared_tier_that_hangs_is_a_miss(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """It takes connections and answers nothing. Sockets wait for an hour: what ends a wait is a deadline of ours."""
    monkeypatch.setattr("rekindle.store.redis._SOCKET_SECONDS", 3600.0)
    monkeypatch.setattr("rekindle.vllm.block_planner.SHARED_LOOKUP_SECONDS", 0.5 if hangs == "lookup" else 60.0)
    monkeypatch.setattr("rekindle.vllm.block_store.LOAD_SECONDS", 0.5)
    link = FaultyLink(redis.port)
    writer = Fleet(tmp_path / "writer", redis=redis.url)
    fleet = Fleet(tmp_path / "kv", redis=f"redis://127.0.0.1:{link.port}/0")
    first = AskedRequest("first", list(range(1000, 1100)), 100)
    run_prompt(writer, first, (3, 9, 4, 7))
    again = replace(first, request_id="again", num_computed_tokens=0)
    link.state = "hanging" if hangs == "lookup" else "open"
    assert fleet.planner.matched(again, 0) == (0 if hangs == "lookup" else 99)
    if hangs == "load":
        own = AskedRequest("own", list(range(3000, 3100)), 100)
        run_prompt(fleet, own, (10, 11, 12, 13))
        link.state = "hanging"
        fleet.planner.admitted(again, ((20, 21, 22, 23),), 99)
        fleet.worker.start_loads(fleet.planner.step({}, lambda _: ()))
        assert loaded(fleet) == ({"again"}, {"again"})
        assert fleet.worker.take_failed_blocks() == {20, 21, 22, 23}
        monkeypatch.setattr("rekindle.vllm.block_store.LOAD_SECONDS", 60.0)
        later = replace(own, request_id="later", num_computed_tokens=0)  # the folder has it, and answers
        assert fleet.planner.matched(later, 0) == 99
        fleet.planner.admitted(later, ((30, 31, 32, 33),), 99)
        fleet.worker.start_loads(fleet.planner.step({}, lambda _: ()))
        assert loaded(fleet) == ({"later"}, set())
    link.close()
    fleet.close()
    writer.close()
