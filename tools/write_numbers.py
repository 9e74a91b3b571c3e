"""`make numbers`: run every bench and rewrite docs/numbers.md.

What was measured is kept as JSON in docs/numbers/, one file a bench and machine; the page is drawn from these files.
`--add FILE.json` takes what `python -m benchmarks NAME --json` printed on another machine, `--show` only prints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.__main__ import BENCHES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "numbers.md"
KEPT = ROOT / "docs" / "numbers"

# A bench, or one on another engine than its usual one.
NAMES = [*BENCHES, *(["prefix:llamacpp", "serve:llamacpp"] if importlib.util.find_spec("llama_cpp") else [])]

HEAD = """# Numbers

Written by `make numbers`; every number here was printed by the command above its table, on the machine named there.
Times on shared machines are noisy: what counts are the ratios, measured in turns within one process.
"""


def main() -> None:
    """Run the benches and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--add", type=Path, metavar="FILE.json", help="add a result from another machine, run nothing")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="BENCH[:ENGINE]", help="run these only")
    chosen = parser.parse_args()
    more = ["--quick"] if chosen.quick else []
    KEPT.mkdir(exist_ok=True)
    if chosen.show:
        for name in chosen.names:
            subprocess.run([sys.executable, "-m", "benchmarks", *words(name), *more], check=True)
        return
    if chosen.add is not None:
        keep(json.loads(chosen.add.read_text("utf-8")))
    else:
        for name in chosen.names:
            keep(measure(name, more))
    results = [(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(KEPT.glob("*.json"))]
    PAGE.write_text("\n".join([HEAD, *(section(stem, result) for stem, result in results)]), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def words(name: str) -> list[str]:
    """A bench as the command line names it."""
    bench, _, engine = name.partition(":")
    return [bench, *(["--engine", engine] if engine else [])]


def measure(name: str, more: list[str]) -> dict[str, Any]:
    """Run a bench here; its plot is written beside the page."""
    plot = f"{name.replace(':', '-')}-{platform.machine()}.png"
    command = [sys.executable, "-m", "benchmarks", *words(name), *more, "--json", "--plot", plot]
    done = subprocess.run(command, cwd=KEPT, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def keep(result: dict[str, Any]) -> None:
    """Keep a result with the commit it belongs to."""
    device = result["machine"]["architecture"] if result["device"] == "cpu" else result["device"].replace(" ", "-")
    engine = "" if result.get("engine", "hf") == "hf" else f"-{result['engine']}"
    path = KEPT / f"{result['bench']}{engine}{shape(result, '-')}-{device}.json"
    path.write_text(json.dumps({**result, "commit": commit()}, indent=1) + "\n", "utf-8")


def shape(result: dict[str, Any], before: str) -> str:
    """The shape of the adapters' bench, which is measured for several."""
    return f"{before}{result['shape']}" if result["bench"] == "adapters" and "shape" in result else ""


def section(stem: str, result: dict[str, Any]) -> str:
    """One result: what ran, where, and what it found."""
    where, versions = result["machine"], result["versions"]
    listed = ("bench", "command", "commit", "device")
    single = {name: v for name, v in result.items() if name not in listed and not isinstance(v, (dict, list))}
    lines = [
        f"## {result['bench']}, {result['device']}"
        + ("" if result.get("engine", "hf") == "hf" else ", llama.cpp")
        + shape(result, ", "),
        "",
        f"- command: `{result['command']}`",
        f"- machine: {where['processor']} ({where['architecture']}), {where['cores']} cores, "
        f"{where['memory_bytes'] / 2**30:.0f} GiB, {where['system']}",
        f"- versions: {', '.join(f'{name} {value}' for name, value in versions.items())}",
        f"- commit: {result['commit']}",
        "",
        "| measure | ours, median (range) | baseline | ratio | bar |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(row[key] for key in ("measure", "ours", "baseline", "ratio", "bar")) + " |"
          for row in result["table"]),
        "",
        "| field | value |",
        "|---|---|",
        *(f"| `{name}` | {f'{value:.4g}' if isinstance(value, float) else json.dumps(value)} |"
          for name, value in single.items()),
        "",
    ]  # fmt: skip
    if (KEPT / f"{stem}.png").is_file():
        lines += [f"![{stem}](numbers/{stem}.png)", ""]
    return "\n".join(lines)


def commit() -> str:
    """The commit measured, marked if the tree had changes."""
    dirty = " with changes" if _git("status", "--porcelain", "--", "src") else ""
    return f"{_git('rev-parse', '--short', 'HEAD') or 'none'}{dirty}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
