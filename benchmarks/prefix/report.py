"""What `bench prefix` found: fields and rows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.base import Report, TableRow, Timing, paired_ratio
from benchmarks.prompts import SharedPrefix

SIZES, DEVICE_SIZES = (180, 1000), (1000, 8192, 32768)  # tokens of a prefix, on a CPU and on a device
ENDING = 20
SHARES = (0.25, 0.5, 0.75, 0.9)
BARS = {
    "over_floor_memory": "<= 1.05",
    "over_floor_disk": "<= 1.15",
    "speedup_disk": ">= 15",
    "load_share": "<= 0.03",
    "partial_recovery": ">= 0.95",
    "cold_vs_llamacpp": "<= 1.03",
    "memory_vs_best": "<= 1.05",
    "disk_vs_slot": "<= 1.00",
    "bytes_vs_slot": "<= 1.00",
}
_IN_MEMORY = ("llamacpp_memory", "ram_cache")


@dataclass
class SizeResults:
    """What was measured at one size."""

    prompts: list[SharedPrefix]
    times: dict[str, list[float]] = field(default_factory=dict)
    asked: list[list[list[int]]] = field(default_factory=list)  # endings whose greedy texts are compared, by prompt
    texts: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Note a time."""
        self.times.setdefault(name, []).append(seconds)

    def timing(self, name: str) -> Timing:
        """All times of one name."""
        return Timing(tuple(self.times[name]))

    def has(self, *names: str) -> bool:
        """Whether there are times of all these names."""
        return all(self.times.get(name) for name in names)


@dataclass
class PrefixResults:
    """What was measured in all."""

    prompts: int
    rounds: int
    random_weights: bool
    sizes: dict[int, SizeResults] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)  # of the rivals
    sizes_on_disk: dict[str, float] = field(default_factory=dict)  # of the rivals, bytes a token
    recovery: dict[float, float] = field(default_factory=dict)
    lookup: Timing = field(default_factory=lambda: Timing((0.0,)))
    bytes_per_token: float = 0.0
    bit_equal: bool | None = None
    exactly: bool = True
    token_bytes: int = 0  # of KV
    peak_device_bytes: int | None = None  # of this process; None without a device

    @property
    def largest(self) -> SizeResults:
        """The results of the longest prefix."""
        return self.sizes[max(self.sizes)]


def add_rows(report: Report, found: PrefixResults) -> None:
    """Fields and rows."""
    report.fields |= {"prompts": found.prompts, "rounds": found.rounds, "exact_matches": found.exactly}
    sizes = {
        f"{size}+{ENDING}": _fields_of(of_size, found) | _speeds(of_size, size * found.token_bytes)
        for size, of_size in found.sizes.items()
    }
    report.fields["sizes"] = sizes
    report.fields |= {name: value for name, value in sizes[f"{max(found.sizes)}+{ENDING}"].items() if name != "spread"}
    report.fields["peak_device_bytes"] = found.peak_device_bytes
    report.fields["partial"] = {f"{share:.2f}": value for share, value in found.recovery.items()}
    report.fields["partial_recovery"] = statistics.mean(found.recovery.values())
    if found.random_weights:
        report.fields |= {"greedy_equal": None, "greedy_equal_reason": "random weights have no likeliest token"}
    else:
        report.fields["greedy_equal"] = _greedy_equal(found, "warm", "restarted")
        if all("rival" in of_size.texts for of_size in found.sizes.values()):
            report.fields["greedy_equal_rival"] = _greedy_equal(found, "rival")
    report.fields["bit_equal_deterministic"] = found.bit_equal
    report.fields["lookup_us"] = found.lookup.median * 1e6
    report.fields["bytes_per_token"] = found.bytes_per_token
    report.fields |= found.sizes_on_disk
    for size, of_size in found.sizes.items():
        report.rows += _rows_of(size, of_size, found, sizes[f"{size}+{ENDING}"])
    report.rows += _last_rows(report, found)


def _last_rows(report: Report, found: PrefixResults) -> list[TableRow]:
    rows = [
        TableRow("partial matches keep", f"{report.fields['partial_recovery']:.3f}", bar=BARS["partial_recovery"]),
        TableRow("same greedy text", str(report.fields["greedy_equal"]), bar="1.0"),
    ]
    if "greedy_equal_rival" in report.fields:
        rows.append(TableRow("same greedy text as the rival", str(report.fields["greedy_equal_rival"]), bar="1.0"))
    rows += [
        TableRow("bit-equal with deterministic", str(found.bit_equal), bar="True"),
        TableRow("lookup", f"{found.lookup.median * 1e6:.0f} us", bar=""),
    ]
    for name, size in found.sizes_on_disk.items():
        ratio = found.bytes_per_token / size
        bar = BARS["bytes_vs_slot"] if name.startswith("slot") else ""
        report.fields[f"bytes_vs_{name.split('_')[0]}"] = ratio
        what = f"bytes a token / {name.removesuffix('_bytes_per_token').replace('_', ' ')}"
        rows.append(TableRow(what, f"{found.bytes_per_token:,.0f}", f"{size:,.0f}", f"{ratio:.3f}", bar))
    return rows


def _greedy_equal(found: PrefixResults, *others: str) -> float:
    """The share of prompts whose replies are the same as cold, as far as the shorter goes."""
    pairs = [
        all(_begin_alike(cold, other) for other in rest)
        for of_size in found.sizes.values()
        for cold, *rest in zip(of_size.texts["cold"], *(of_size.texts[name] for name in others), strict=True)
    ]
    return sum(pairs) / len(pairs)


def _begin_alike(a: list[int], b: list[int]) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _fields_of(found: SizeResults, all_found: PrefixResults) -> dict[str, Any]:
    timing = found.timing
    disk = timing("disk").median
    return {
        "cold_ttft_s": timing("cold").median,
        "warm_memory_ttft_s": timing("engine").median,
        "warm_memory_tier_ttft_s": timing("memory").median,
        "warm_disk_ttft_s": disk,
        **_cold_pages(found),
        **{f"{name}_ttft_s": timing(name).median for name in all_found.titles if found.has(name)},
        "floor_ttft_s": timing("floor").median,
        "floor_fresh_ttft_s": timing("fresh_floor").median,
        "speedup_memory": timing("cold").median / timing("engine").median,
        "speedup_disk": timing("cold").median / disk,
        "speedup_floor": timing("cold").median / timing("floor").median,
        "over_floor_memory": paired_ratio(timing("engine"), timing("floor")),
        "over_floor_memory_tier": paired_ratio(timing("memory"), timing("floor")),
        "over_floor_disk": paired_ratio(timing("disk"), timing("fresh_floor")),
        **_against_llamacpp(found),
        "load_s": timing("load").median,
        "load_share": timing("load").median / timing("cold").median,
        "spread": {name: timing(name).as_json() for name, times in found.times.items() if times},
    }


def _speeds(found: SizeResults, kv_bytes: int) -> dict[str, float]:
    """The KV of the prefix, and how fast it came: all that a first token takes longer than with KV in the engine."""
    fields: dict[str, float] = {"kv_bytes": kv_bytes}
    for name, floor in (("memory", "floor"), ("disk", "fresh_floor")):
        seconds = found.timing(name).median - found.timing(floor).median
        fields[f"{name}_gb_s"] = kv_bytes / max(seconds, 1e-6) / 1e9
    return fields


def _against_llamacpp(found: SizeResults) -> dict[str, float]:
    if not found.has("llamacpp_cold", "slot_restore", "llamacpp_memory"):
        return {}
    best = _best_in_memory(found)
    return {
        "cold_vs_llamacpp": paired_ratio(found.timing("cold"), found.timing("llamacpp_cold")),
        "memory_vs_best": paired_ratio(found.timing("engine"), found.timing(best)),
        "disk_vs_slot": paired_ratio(found.timing("disk"), found.timing("slot_restore")),
    }


def _best_in_memory(found: SizeResults) -> str:
    """The faster of the rivals that were measured."""
    measured = [name for name in _IN_MEMORY if found.has(name)]
    return min(measured, key=lambda name: found.timing(name).median, default=_IN_MEMORY[0])


def _rows_of(size: int, found: SizeResults, all_found: PrefixResults, fields: dict[str, Any]) -> list[TableRow]:
    timing, name = found.timing, f"{size}+{ENDING}"
    floor, fresh, cold = str(timing("floor")), str(timing("fresh_floor")), str(timing("cold"))
    large = size == max(all_found.sizes)
    dropped = [ratio for ratio in (fields["over_floor_disk_cold_pages"],) if ratio is not None]

    def row(what: str, ours: str, baseline: str, ratio: float, bar: str = "") -> TableRow:
        return TableRow(f"{name}, {what}", str(timing(ours)), baseline, f"{ratio:.3f}", bar)

    against = {
        "cold_vs_llamacpp": ("cold / llama.cpp alone", "cold", "llamacpp_cold"),
        "memory_vs_best": ("same process / best in memory", "engine", _best_in_memory(found)),
        "disk_vs_slot": ("new process, disk / slot restored", "disk", "slot_restore"),
    }
    rivals = [rival for rival in all_found.titles if found.has(rival) and rival != "llamacpp_cold"]
    # A restarted rival has its floor in the process it was measured in.
    floors = {rival: "fresh_floor" if rival in ("slot_restore", "disk_cache") else "floor" for rival in rivals}
    return [
        row("same process / floor", "engine", floor, fields["over_floor_memory"], BARS["over_floor_memory"]),
        row("memory tier / floor", "memory", floor, fields["over_floor_memory_tier"]),
        row("new process, disk / floor", "disk", fresh, fields["over_floor_disk"], BARS["over_floor_disk"]),
        *(row("disk, pages dropped / floor", "cold_pages", fresh, ratio) for ratio in dropped),
        row("cold / disk", "disk", cold, fields["speedup_disk"], BARS["speedup_disk"] if large else ""),
        row("cold / floor", "floor", cold, fields["speedup_floor"]),
        *_speed_rows(name, fields),
        *(
            row(what, ours, str(timing(theirs)), fields[key], BARS[key])
            for key, (what, ours, theirs) in against.items()
            if key in fields
        ),
        *(
            row(f"{all_found.titles[r]} / floor", r, str(timing(floors[r])), paired_ratio(timing(r), timing(floors[r])))
            for r in rivals
        ),
        row("load alone / cold", "load", cold, fields["load_share"], BARS["load_share"] if large else ""),
    ]


def _speed_rows(name: str, fields: dict[str, Any]) -> list[TableRow]:
    size = f"{fields['kv_bytes'] / 1e6:,.0f} MB"
    speeds = {"from memory": fields["memory_gb_s"], "new process, from disk": fields["disk_gb_s"]}
    return [TableRow(f"{name}, KV {where}", f"{speed:.1f} GB/s", size) for where, speed in speeds.items()]


def _cold_pages(found: SizeResults) -> dict[str, Any]:
    """First tokens from dropped pages; null where the system cannot be asked to drop them."""
    names = ("warm_disk_cold_pages_ttft_s", "over_floor_disk_cold_pages")
    if not found.times["cold_pages"]:
        return {**dict.fromkeys(names), "cold_pages_reason": "this system cannot be asked to drop pages"}
    timing = found.timing("cold_pages")
    return dict(zip(names, (timing.median, paired_ratio(timing, found.timing("fresh_floor"))), strict=True))
