"""Charts of what benches found, drawn from their JSON alone: they can be drawn again without measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rekindle.errors import EngineMissing, InvalidSetting

Result = Mapping[str, Any]
Panel = Callable[[Any, Result], None]  # draws a part of a result on matplotlib's axes

OURS, THEIRS = "#1b7837", "#8c8c8c"
_PREFIX = {
    "cold_ttft_s": "cold",
    "warm_disk_ttft_s": "after a restart",
    "warm_disk_cold_pages_ttft_s": "restart, pages dropped",
    "warm_memory_tier_ttft_s": "from memory",
    "warm_memory_ttft_s": "still in the engine",
    "floor_ttft_s": "floor: the ending alone",
    "transformers_memory_ttft_s": "transformers, in memory",
    "llamacpp_cold_ttft_s": "llama.cpp, cold",
    "llamacpp_memory_ttft_s": "llama.cpp, in memory",
    "ram_cache_ttft_s": "its Python RAM cache",
    "slot_restore_ttft_s": "slot restored by hand",
    "disk_cache_ttft_s": "its Python disk cache",
}
_RIVALS = {name for name in _PREFIX.values() if name.startswith(("transformers", "llama.cpp", "its", "slot"))}


def save_chart(result: Result, path: Path) -> None:
    """Draw a result into a .png file."""
    save([(panel, result) for panel in panels_of(result)], path)


def save(panels: Sequence[tuple[Panel, Result]], path: Path) -> None:
    """Draw panels side by side into a .png file."""
    draw(panels).savefig(path, dpi=100, metadata={"Software": None})


def draw(panels: Sequence[tuple[Panel, Result]]) -> Any:
    """A matplotlib figure of panels side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EngineMissing("Plots need matplotlib: pip install 'rekindle-llm[bench]'") from error
    figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
    for axes, (panel, result) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, result)
    return figure


def bars(axes: Any, values: Mapping[str, float], form: str, title: str, theirs: Sequence[str] = ()) -> None:
    """Horizontal bars, each with its number inside the frame; those of others are grey."""
    axes.set_title(title)
    axes.xaxis.set_visible(False)
    if not values:
        return
    axes.barh(list(values), list(values.values()), color=[THEIRS if name in theirs else OURS for name in values])
    largest = max(values.values()) or 1.0
    for place, value in enumerate(values.values()):
        inside = value > 0.75 * largest
        where = (
            {"x": value - 0.01 * largest, "ha": "right", "color": "white"} if inside else {"x": value + 0.01 * largest}
        )
        axes.text(y=place, s=form.format(value), va="center", **where)
    axes.set_xlim(0, 1.02 * largest)
    axes.invert_yaxis()


def groups(axes: Any, names: Sequence[str], values: Mapping[str, Sequence[float]], title: str) -> None:
    """Bars side by side for each name, with a legend above them."""
    width = 0.8 / len(values)
    for number, (label, own) in enumerate(values.items()):
        places = [place + (number + 0.5) * width - 0.4 for place in range(len(names))]
        axes.bar(places, own, width, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.35 * max(max(own) for own in values.values()) or 1.0)
    axes.legend(loc="upper left", ncols=3, fontsize=8)
    axes.set_title(title)


def lines(axes: Any, values: Mapping[str, tuple[Sequence[float], Sequence[float]]], across: str, title: str) -> None:
    """A line for each name, from zero, with a legend above them."""
    axes.set_xlabel(across)
    axes.set_title(title)
    for label, (at, own) in values.items():
        axes.plot(at, own, ".-", label=label)
    if values:
        axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
        axes.legend(loc="upper left", ncols=2, fontsize=8)


def cold_warm_restart(title: str) -> Panel:
    """First tokens of a long prompt: cold, warm, and after a restart."""

    def panel(axes: Any, result: Result) -> None:
        size, found = list(result["sizes"].items())[-1]
        shown = {"cold": "cold_ttft_s", "warm": "warm_memory_ttft_s", "after a restart": "warm_disk_ttft_s"}
        values = {name: found[field] * 1e3 for name, field in shown.items()}
        bars(axes, values, "{:,.0f} ms", f"first token, {title}, {size} tokens", theirs=["cold"])

    return panel


def panels_of(result: Result) -> Sequence[Panel]:
    """The panels of a bench; with random weights of a shape, or calibrating, it finds other things."""
    match result["bench"]:
        case "prefix":
            return [_prefix(size) for size in result["sizes"]]
        case "chunks" if "quality" in result:
            return [_calibrated]
        case "chunks" if "sizes" in result:
            return [_chunks_shape]
        case "chunks" if result["endurance"] is None:
            return _PANELS["chunks"][:2]
        case "adapters" if "shape" in result:
            return [_adapters_shape]
        case "adapters" if "scenarios" not in result:
            raise InvalidSetting("Nothing is drawn of a calibration of bits: leave --plot out.")
        case "sparse" if result["shape"] is not None:
            return _PANELS["sparse"][:1]
    return _PANELS[result["bench"]]


def _prefix(size: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        found = result["sizes"][size]
        values = {label: found[name] * 1e3 for name, label in _PREFIX.items() if found.get(name) is not None}
        bars(axes, values, "{:,.0f} ms", f"first token, {size} tokens", [*_RIVALS, "floor: the ending alone"])

    return panel


def _engine_part(name: str, rival: str, size: str, title: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        rows = result[name]
        values = {
            who: [row[key]["median_s"] * 1e3 for row in rows]
            for who, key in (("rekindle", "ours"), (f"transformers {rival}", rival))
        }
        groups(axes, [f"{row[size]:,}" for row in rows], values, title)

    return panel


def _store_load(axes: Any, result: Result) -> None:
    names = {
        "memory_get_mb_s": "from memory",
        "get_mb_s": "from disk",
        "file_get_mb_s": "plain read",
        "diskcache_get_mb_s": "diskcache",
    }
    values = {label: result[name] for name, label in names.items()}
    bars(axes, values, "{:,.0f} MB/s", "load 1,000 tokens, warm pages", ["plain read", "diskcache"])


def _store_lookup(axes: Any, result: Result) -> None:
    values = {f"{size} rows": result[f"lookup_us_{size}"] for size in ("1k", "1m")}
    bars(axes, values, "{:,.0f} us", "look up 8,000 tokens")


def _serve_part(field: str, title: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        along, between = ("part", "reuse") if result.get("workload") == "rag" else ("clients", "cache")
        values: dict[str, list[float]] = {}
        for row in result["rows"]:
            values.setdefault(f"{between} {row[between]}", []).append(row[field] or 0.0)
        groups(axes, list(dict.fromkeys(f"{along} {row[along]}" for row in result["rows"])), values, title)

    return panel


def _knowledge_recall(axes: Any, result: Result) -> None:
    bars(axes, result["recall5"], "{:.3f}", "recall of 5 passages", ["weighted", "bm25", "embedding"])


def _knowledge_time(axes: Any, result: Result) -> None:
    values = {f"{result[f'passages_{size}']:,} passages": result[f"retrieve_ms_{size}"] for size in ("1k", "100k")}
    bars(axes, values, "{:.1f} ms", "retrieve")


def _chunks_part(field: str, form: str, title: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        rows = [row for row in result["rows"] if row.get(field) is not None and _is_main(row["mode"])]
        label = {id(row): f"{row['mode']}, {row['computed_share']:.0%} computed" for row in rows}
        theirs = [label[id(row)] for row in rows if row["mode"] != "rekindle"]
        bars(axes, {label[id(row)]: row[field] for row in rows}, form, title, theirs)

    return panel


def _is_main(mode: str) -> bool:
    return mode in ("set-cache", "full-cache", "random", "h2o", "leading", "cacheblend", "cache-craft", "rekindle")


def _chunks_endurance(axes: Any, result: Result) -> None:
    windows = result["endurance"].get("windows") or []
    at = [one["first"] + one["questions"] / 2 for one in windows]
    speeds = {"times sooner than the prefix cache": (at, [one["ttft_vs_prefix"] for one in windows])}
    lines(axes, speeds if windows else {}, "question", "first token over a long run")


def _chunks_shape(axes: Any, result: Result) -> None:
    found = result["sizes"].values()
    fields = {"computing everything": "full_s", "recomputing 30 %": "reuse_s"}
    values = {label: [one[field] for one in found] for label, field in fields.items()}
    groups(axes, [f"{one['tokens']:,} tokens" for one in found], values, "seconds to the first token")


def _calibrated(axes: Any, result: Result) -> None:
    tried = {name: one["tried"] for name, one in result["calibrated"].items()}
    values = {
        name: ([one["computed_share"] for one in some], [one["rouge_l"] for one in some])
        for name, some in tried.items()
    }
    lines(axes, values, "computed share of the passages", "ROUGE-L to the full computation")
    axes.axhline(result["quality"], linestyle=":", color="grey")


def _adapters_room(axes: Any, result: Result) -> None:
    first = result["scenarios"][0]
    used = {mode: own for mode, own in result["used_bytes"].items() if any(own)}
    values = {mode: (list(range(1, len(own) + 1)), [size / 1e6 for size in own]) for mode, own in used.items()}
    lines(axes, values, f"requests of {first['scenario']}; dashed: the limit", "MB on disk")
    axes.axhline(first["limit_bytes"] / 1e6, color="black", linestyle="--")


def _adapters_time(axes: Any, result: Result) -> None:
    rows = [row for row in result["rows"] if row["mean_ttft_s"] is not None]
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    found = {(row["scenario"], row["mode"]): row["mean_ttft_s"] for row in rows}
    modes = dict.fromkeys(row["mode"] for row in rows)
    values = {mode: [found.get((name, mode), 0.0) for name in names] for mode in modes}
    groups(axes, names, values, "mean seconds to the first token")


def _adapters_shape(axes: Any, result: Result) -> None:
    names = {"compute": "computed", "delta": "differences", "whole": "quantized", "raw": "raw"}
    values = {label: result[f"{name}_s"] * 1e3 for name, label in names.items()}
    bars(axes, values, "{:,.1f} ms", f"{result['shape']}, {result['tokens']:,} tokens of KV", ["computed"])


def _warm_start_ways(axes: Any, result: Result) -> None:
    own = [row for row in result["rows"] if row["half"] == "chosen"]
    theirs = [row["way"] for row in own if row["way"] != result["chosen"]]
    bars(axes, {row["way"]: row["kl"] for row in own}, "{:.4f}", "KL, median of adapters", theirs)


def _warm_start_budgets(axes: Any, result: Result) -> None:
    own = [row for row in result["rows"] if row["half"] == "shown" and row["source"] == "model"]
    at = [row["budget"] for row in own]
    values = {name: (at, [row[part] for row in own]) for name, part in (("KL", "kl"), ("time / computing", "ratio"))}
    lines(axes, values, "share that is computed", result["chosen"])


def _policies(axes: Any, result: Result) -> None:
    values = {row["policy"].replace(", ", "\n"): float(row["computed_tokens"]) for row in result["second_half"]}
    bars(axes, values, "{:,.0f}", "tokens to compute, second halves", [name for name in values if name != "lru"])


def _answers_time(axes: Any, result: Result) -> None:
    values = {row["mode"]: row["mean_latency_s"] for row in result["rows"]}
    theirs = [name for name in values if not name.startswith("ours")]
    bars(axes, values, "{:.2f} s", "mean time of an answer", theirs)


def _answers_guard(axes: Any, result: Result) -> None:
    values = {}
    for guarded, way in ((True, "guarded"), (False, "cosine")):
        own = [point for point in (result["guard"] or {}).get("curve") or [] if point["guarded"] == guarded]
        at = [point["threshold"] for point in own]
        if own:
            values[f"in other words, {way}"] = at, [point["again_served"] for point in own]
            values[f"near misses, {way}"] = at, [point["near_served"] for point in own]
    lines(axes, values, "similarity threshold", "share answered from the bank")


def _stream_ratios(axes: Any, result: Result) -> None:
    """Medians over traces, as multiples of computing; what takes more than twice as long is not shown."""
    rows = [row for row in result["rows"] if row["ttft_s"] is not None]
    local = {(row["trace"], row["ratio"]): row["ttft_s"] for row in rows if row["mode"] == "local"}
    values = {}
    for mode in dict.fromkeys(row["mode"] for row in rows if row["mode"] not in ("local", "plain")):
        shares: dict[float, list[float]] = {}
        for row in rows:
            if row["mode"] == mode and row.get("level") in (None, result["level"]):
                shares.setdefault(row["ratio"], []).append(row["ttft_s"] / local[row["trace"], row["ratio"]])
        shown = {ratio: median(own) for ratio, own in sorted(shares.items()) if median(own) <= 2}
        if shown:
            values[mode] = list(shown), list(shown.values())
    lines(axes, values, f"streaming at {result['level']} / computing", "first token / computing alone")
    axes.set_xscale("log", base=2)
    axes.axhline(1.0, color="grey", linewidth=0.8)


def _stream_gain(axes: Any, result: Result) -> None:
    values = {f"{one['what']}: {one['value']}": one["gain"] for one in result.get("sensitivity") or []}
    bars(axes, values, "{:.2f}x", "sooner than computing, link as fast")


def _sparse(field: str, title: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        values = {}
        for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
            own = sorted((row for row in result["rows"] if row["tokens"] == tokens), key=lambda row: row["kept"])
            values[f"{tokens:,} tokens"] = [row["kept"] for row in own], [row[field] for row in own]
        lines(axes, values, "share of the blocks that is kept", title)

    return panel


def _anywhere(axes: Any, result: Result) -> None:
    values = {f"{row['kind']}, {row['mode']}": row["kl"] for row in result["rows"]}
    bars(axes, values, "{:.3f}", "KL from computing")


def _text(axes: Any, result: Result) -> None:
    values = {name: result[f"{name}_ms"] for name in ("cut", "find", "miss")}
    bars(axes, values, "{:.1f} ms", f"{result['tokens']:,} tokens among {result['places']:,} places")


def _slower(axes: Any, result: Result) -> None:
    largest = max(row["tokens"] for row in result["rows"])
    rows = [row for row in result["rows"] if (row["request"], row["tokens"]) == ("later", largest)]
    values = {row["mechanism"]: row["ratio"] for row in rows}
    bars(axes, values, "{:.2f}", f"time, computing = 1, {largest:,} tokens")


def _agents(field: str, title: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        names = {
            "rekindle_llamacpp": "Rekindle, llama.cpp",
            "rekindle_hf": "Rekindle, transformers",
            "llamacpp_server": "llama.cpp's server",
        }
        at = [turn["turn"] for turn in result["turns"]]
        values = {label: (at, [turn[side][field] for turn in result["turns"]]) for side, label in names.items()}
        lines(axes, values, "turn", title)

    return panel


def _fleet(field: str, title: str) -> Panel:
    def panel(axes: Any, result: Result) -> None:
        rivals = {"rekindle": "Rekindle", "lmcache": "LMCache", "vllm": "vLLM alone"}
        phases = [phase for phase in ("cold", "restarted") if any(row["phase"] == phase for row in result["rows"])]
        measured = {(row["rival"], row["phase"]): row[field] or 0.0 for row in result["rows"]}
        values = {name: [measured.get((rival, phase), 0.0) for phase in phases] for rival, name in rivals.items()}
        groups(axes, phases, values, title)

    return panel


_PANELS: dict[str, list[Panel]] = {
    "engine": [
        _engine_part("prefill", "model", "tokens", "prefill, ms, by tokens"),
        _engine_part("decode", "generate", "context_tokens", "decode, ms a token, by context"),
    ],
    "store": [_store_load, _store_lookup],
    "warmstart": [_warm_start_ways, _warm_start_budgets],
    "serve": [
        _serve_part("ttft_p50", "first token, median seconds"),
        _serve_part("tokens_per_s", "tokens of replies a second"),
    ],
    "knowledge": [_knowledge_recall, _knowledge_time],
    "chunks": [
        _chunks_part("kl", "{:.3f}", "KL from the full computation"),
        _chunks_part("rouge_l", "{:.2f}", "ROUGE-L to the full computation"),
        _chunks_endurance,
    ],
    "anywhere": [_anywhere],
    "text": [_text],
    "adapters": [_adapters_room, _adapters_time],
    "policies": [_policies],
    "answers": [_answers_time, _answers_guard],
    "stream": [_stream_ratios, _stream_gain],
    "sparse": [_sparse("ratio", "prefill, dense = 1"), _sparse("kl", "KL of the next tokens from dense")],
    "slower": [_slower],
    "agents": [
        _agents("computed", "computed tokens, restart at 18, swap at 26"),
        _agents("first_token_s", "seconds to the first token"),
    ],
    "fleet": [_fleet("ttft_p50", "first token, median seconds"), _fleet("hit_share", "share of tokens not computed")],
}
