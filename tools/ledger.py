"""`make ledger`: the headline numbers of five benches, to run before and after a large change.

`make ledger BEFORE=../other-checkout` runs both checkouts in turns, bench by bench, and prints both columns. Each one
runs in its own environment (`.venv`), so what is compared is what is checked out there. About ten minutes a checkout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORTH_A_LOOK = 1.15  # times worse: less than that is noise on a shared machine


class Headline(NamedTuple):
    """A number of a bench: the path of its field (`a / b` divides two), and which way is better."""

    bench: str
    field: str
    better: Literal["lower", "higher"]


HEADLINES = (
    Headline("engine", "prefill_vs_model", "lower"),
    Headline("engine", "decode_vs_generate", "lower"),
    Headline("engine", "batch4_speedup", "higher"),
    Headline("engine", "scattered30_vs_full", "lower"),
    Headline("engine", "help_seconds", "lower"),
    Headline("prefix", "over_floor_memory", "lower"),
    Headline("prefix", "over_floor_memory_tier", "lower"),
    Headline("prefix", "over_floor_disk", "lower"),
    Headline("prefix", "speedup_memory", "higher"),
    Headline("prefix", "speedup_disk", "higher"),
    Headline("prefix", "partial_recovery", "higher"),
    Headline("prefix", "lookup_us", "lower"),
    Headline("store", "put_mb_s / file_put_mb_s", "higher"),
    Headline("store", "get_vs_file", "higher"),
    Headline("store", "get_vs_file_cold_pages", "higher"),
    Headline("store", "lookup_us_1k", "lower"),
    Headline("serve", "batch_ratio_4", "higher"),
    Headline("serve", "tokens_per_s", "higher"),
    Headline("serve", "ttft_p50", "lower"),
    Headline("chunks", "best.ttft_vs_none", "higher"),
    Headline("chunks", "best.kl", "lower"),
    Headline("chunks", "best_vs_cachecraft.kl_ratio", "lower"),
    Headline("chunks", "streams.sample.warmed.computed_tokens / streams.sample.computed_tokens_prefix", "lower"),
    Headline("chunks", "probe_cost", "lower"),
)
BENCHES = tuple(dict.fromkeys(line.bench for line in HEADLINES))


def main() -> None:
    """Run the benches and print a line a headline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, with a .venv of its own")
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"only some of {', '.join(BENCHES)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.benches) - set(BENCHES):
        parser.error(f"not in the ledger: {', '.join(sorted(unknown))}")
    checkouts = [ROOT] if chosen.before is None else [chosen.before.resolve(), ROOT]
    print(f"{'':82}" + ("" if chosen.before is None else f"{'before':>10}{'after':>10}{'change':>10}"))
    for number, bench in enumerate(chosen.benches or BENCHES):
        order = checkouts if number % 2 == 0 else checkouts[::-1]  # neither always finds the warmer machine
        results = {checkout: run(checkout, bench) for checkout in order}
        for line in HEADLINES:
            if line.bench == bench:
                print(shown(line, [value(results[checkout], line.field) for checkout in checkouts]), flush=True)


def run(checkout: Path, bench: str) -> dict[str, Any]:
    """What a bench prints in a checkout. Older ones have it as `rekindle bench`."""
    own = checkout / ".venv" / "bin" / "python"
    command = ["benchmarks"] if (checkout / "benchmarks" / "__main__.py").is_file() else ["rekindle", "bench"]
    words = [str(own) if own.is_file() else sys.executable, "-m", *command, bench, "--quick", "--json"]
    print(f"{bench} in {checkout}", file=sys.stderr, flush=True)
    done = subprocess.run(words, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} failed in {checkout}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def value(result: dict[str, Any], field: str) -> float | None:
    """The number at a path; None where a checkout has none."""
    upper, _, lower = field.partition(" / ")
    found: Any = result
    for name in upper.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, (int, float)):
        return None
    if not lower:
        return float(found)
    divisor = value(result, lower)
    return found / divisor if divisor else None


def shown(line: Headline, values: list[float | None]) -> str:
    """One line: the name, a column a checkout, and the change where there are two."""
    text = f"{line.bench + ': ' + line.field:82}" + "".join(
        f"{'-':>10}" if one is None else f"{one:10.4g}" for one in values
    )
    if len(values) < 2 or None in values or not values[0] or not values[1]:
        return text
    change = values[1] / values[0]
    worse = change if line.better == "lower" else 1 / change
    return f"{text}{change:9.2f}x" + ("  worse" if worse > WORTH_A_LOOK else "")


if __name__ == "__main__":
    main()
