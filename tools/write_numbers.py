"""`make numbers`: run every bench, keep what it printed in docs/numbers/, and rewrite the pages from there.

`--pages` measures nothing and only rewrites; `--add FILE.json` takes what `python -m benchmarks NAME --json` printed on
another machine; `--show` only prints. docs/numbers.md and its charts are drawn from the kept files. Other pages
name the file behind each number, a path in it and a format: `<!-- = prefix-x86_64 speedup_disk .0f -->13<!-- = -->`.
The format `ms` is for seconds; a list of objects is a table, and `rows/mode=h2o/kl` is a number of one of its rows; the
path `when` says where and when a file was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.__main__ import BENCHES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "numbers.md"
KEPT = ROOT / "docs" / "numbers"
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "concepts").glob("*.md")),
)

# A bench, or one on another engine than its usual one.
NAMES = [*BENCHES, *(["prefix:llamacpp", "serve:llamacpp"] if importlib.util.find_spec("xllamacpp") else [])]

# What a bench measures: folders of src/rekindle. Its own files count too.
MEASURED = {
    "prefix": "engine cache store codec session text core",
    "serve": "server engine cache store codec session text core",
    "chunks": "chunks engine cache store session core",
    "text": "store core",
    "anywhere": "chunks engine cache store session core",
    "answers": "answers idle knowledge engine cache store session core",
    "adapters": "codec engine cache store apps.py session core",
    "policies": "store core",
    "warmstart": "chunks engine core",
    "stream": "remote codec engine cache session core",
    "knowledge": "knowledge engine/embedding",
    "store": "store codec core",
    "engine": "engine core",
    "engines": "engine cache store codec session text core",
    "sparse": "",
    "slower": "engine cache chunks store codec session core",
    "agents": "server engine cache store codec session text core",
    "fleet": "vllm store codec core",
}

MAX_ROWS = 9
# The rows of a bench that the page shows, by the name of the measure; all of them where nothing is said.
HEADLINES = {
    "prefix": """1000+20, new process, disk / floor; 1000+20, cold / disk; partial *; same greedy text""",
    "serve": """4 clients, first token p50, *; 4 streams *; their texts equal; known, approximate / *""",
    "chunks": """full-cache; leading *; cache-craft, *; rekindle 30%; rekindle 40%; KL, *; ROUGE-L, *;
        * reused: first token; * warmed: first token; 300 questions *: speedup""",
    "anywhere": """*, text""",
    "text": """search *; size *""",
    "answers": """none; kv-only; percache; ours-verified; ours-direct; ours-verified below *; ours-direct below *;
        verified text *; idle work *, raised; near misses *; questions in other words *; labelled *""",
    "adapters": """S1, ours:*; first token sooner *; bits *; KL, median *; differences, *""",
    "policies": """*, lru; *, utility; *, mobilora""",
    "warmstart": """shown: * [35]0%, *""",
    "stream": """ideal overlap *; fixed hybrid *; bidirectional / ours; sooner of *; our schedule *; error of *;
        origin: slow; context tokens: 2048; busy cores: 2""",
    "store": """keep 1,000 *; keep, *; fsyncs *; load*; look up *; reopen *; storm *""",
    "sparse": """8,064 tokens, density=0.5; 32,768 tokens, density=0.[15]; schedules *""",
    "slower": """prefix from disk, *, later; chunks, *, later; wrong drafts, 1,024 *, later; remote KV, slow *""",
    "agents": """restart: *; swap: *; sub-agents: *; all: *""",
    "fleet": """*LMCache*: first token; restarted, vLLM*: first token; *LMCache*: hit share; bytes flipped, *;
        worker killed, *; tiers hang, *""",
    "engine": """prefill 1024 *; prefill 8192 *; decode at 1024 *; 4 rows, *; 30 % of *; 64 tokens after *""",
}

HEAD = """# Numbers

![cold, warm, after a restart](numbers/cold-warm-restart.png)

Drawn by `make numbers` from the files that each section names: the JSON that the command printed, whole. On shared
machines ratios count, not times: rivals run in turns within one process. A bar is what was hoped for, met or not.
**Stale** means that the code measured has changed since; *unknown*, that this copy has no history to tell by.
"""


def main() -> None:
    """Measure what is asked for, then write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--add", type=Path, metavar="FILE.json", help="add a result from another machine, run nothing")
    parser.add_argument("--pages", action="store_true", help="rewrite the pages, run nothing")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="BENCH[:ENGINE]", help="run these only")
    chosen = parser.parse_args()
    more = ["--quick"] if chosen.quick else []
    if chosen.show:
        for name in chosen.names:
            subprocess.run([sys.executable, "-m", "benchmarks", *words(name), *more], check=True)
        return
    if chosen.add is not None:
        keep(json.loads(chosen.add.read_text("utf-8")))
    elif not chosen.pages:
        for name in chosen.names:
            keep(measure(name, more))
    write_pages()


def words(name: str) -> list[str]:
    """A bench as the command line names it."""
    bench, _, engine = name.partition(":")
    return [bench, *(["--engine", engine] if engine else [])]


def measure(name: str, more: list[str]) -> dict[str, Any]:
    """Run a bench here."""
    command = [sys.executable, "-m", "benchmarks", *words(name), *more, "--json"]
    result: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return result


def keep(result: dict[str, Any]) -> None:
    """Keep a result with the commit it belongs to."""
    device = result["machine"]["architecture"] if result["device"] == "cpu" else result["device"].replace(" ", "-")
    engine = "" if result.get("engine", "hf") == "hf" else f"-{result['engine']}"
    other = result["bench"] in ("adapters", "chunks") and result["model"] != "smollm2"
    model = f"-{result['model']}" if other else ""
    workload = f"-{result['workload']}" if result["bench"] == "serve" and "workload" in result else ""
    dirty = " with changes" if _git("status", "--porcelain", "--", "src", "benchmarks").stdout.strip() else ""
    commit = result.get("commit") or f"{_git('rev-parse', '--short', 'HEAD').stdout.strip() or 'none'}{dirty}"
    path = KEPT / f"{result['bench']}{engine}{workload}{model}-{device}.json"
    path.write_text(json.dumps({**result, "commit": commit}, indent=1) + "\n", "utf-8")


def write_pages() -> None:
    """Rewrite docs/numbers.md, its charts, and the numbers of other pages."""
    for stem, result in kept().items():
        if result["bench"] in BENCHES:
            charts.save_chart(result, KEPT / f"{stem}.png")
    shown = (("prefix-x86_64", "transformers"), ("prefix-llamacpp-x86_64", "llama.cpp"))
    panels = [(charts.cold_warm_restart(title), kept()[stem]) for stem, title in shown]
    charts.save(panels, KEPT / "cold-warm-restart.png")
    PAGE.write_text(numbers_page(), "utf-8")
    for path in PAGES:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")


@cache
def kept() -> dict[str, dict[str, Any]]:
    """Every result, by the name of its file."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(KEPT.glob("*.json"))}


def numbers_page() -> str:
    """docs/numbers.md."""
    benches = [bench for bench in MEASURED if any(result["bench"] == bench for result in kept().values())]
    return "\n".join([HEAD, *(section(bench) for bench in benches)])


def section(bench: str) -> str:
    """One bench: its charts, where each file comes from, its main rows."""
    found = {stem: result for stem, result in kept().items() if result["bench"] == bench}
    drawn = [f"![{stem}](numbers/{stem}.png)" for stem in found if bench in BENCHES]
    sources = [f"- [{stem}.json](numbers/{stem}.json): {when(stem)}; {commands(one)}" for stem, one in found.items()]
    rows = [
        ({"on": stem.removeprefix(f"{bench}-")} if len(found) > 1 else {}) | row
        for stem, result in found.items()
        for row in result["table"]
        if any(fnmatchcase(row["measure"], wanted) for wanted in headlines(bench))
    ]
    charted = [" ".join(drawn), ""] * bool(drawn)
    return "\n".join([f"## {bench}", "", *charted, *sources, "", table(rows[:MAX_ROWS]), ""])


def commands(result: dict[str, Any]) -> str:
    """What measured it: one run, or several whose units were put together."""
    runs = result.get("measured_by", ())
    listed = "; ".join(f"`{command}`" for command in dict.fromkeys(run["command"] for run in runs))
    return f"pooled from {len(runs)} runs: {listed}" if runs else f"`{result['command']}`"


def headlines(bench: str) -> list[str]:
    """The measures of a bench that the page shows, as patterns."""
    return [wanted.strip() for wanted in HEADLINES.get(bench, "*").split(";")]


def table(rows: list[dict[str, str]]) -> str:
    """Objects as a Markdown table; their names are the columns."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (rows[0], *(row.values() for row in rows))]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def when(stem: str) -> str:
    """Where and when a file was measured, and whether its code has changed since."""
    result = kept()[stem]
    where = result["machine"]
    on = where["processor"] if result["device"] == "cpu" else result["device"]
    commit = measured_commit(stem)
    day = _git("log", "-1", "--format=%cs", commit).stdout.strip() or "on an unknown day"
    fresh = state(result["bench"], commit)
    return f"machine: {on}, {where['cores']} cores; commit: {result.get('commit', commit)}, {day}, {fresh}"


def measured_commit(stem: str) -> str:
    """The commit a file belongs to; where it does not say, the last that changed it."""
    said: str | None = kept()[stem].get("commit")
    return said.split()[0] if said else _git("log", "-1", "--format=%h", "--", f"{KEPT / stem}.json").stdout.strip()


def state(bench: str, commit: str) -> str:
    """Whether the code of a bench is still that of a commit."""
    changed = _git("diff", "--quiet", commit, "--", *code(bench)).returncode if commit else -1
    return {0: "current", 1: "**stale**"}.get(changed, "*unknown*")


def code(bench: str) -> list[str]:
    """The files that a bench depends on."""
    module = BENCHES.get(bench, "tools.compare_engines").removesuffix(".bench").replace(".", "/")
    own = module if (ROOT / module).is_dir() else f"{module}.py"
    return [own, *(f"src/rekindle/{name}" for name in MEASURED[bench].split())]


def filled(text: str) -> str:
    """A page with every number that names its file taken from there."""
    return re.sub(r"(<!-- = (\S+) (\S+)(?: (\S+))? -->).*?(<!-- = -->)", _filled, text, flags=re.DOTALL)


def _filled(match: re.Match[str]) -> str:
    start, stem, path, form, stop = match.groups()
    if path == "when":
        return f"{start}{when(stem)}{stop}"
    value: Any = kept()[stem]
    for name in path.split("/"):
        value = _item(value, name) if isinstance(value, list) else value[name]
    if isinstance(value, list):
        return f"{start}\n\n{table(value)}\n\n{stop}"
    return f"{start}{f'{value * 1e3:,.0f} ms' if form == 'ms' else format(value, form or '')}{stop}"


def _item(rows: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """The one row with these values, such as `mode=rekindle,budget=0.3`. Raises `KeyError` for none and several."""
    fields = [field.split("=", 1) for field in wanted.split(",")]
    found = [row for row in rows if all(str(row[name]) == value for name, value in fields)]
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows have {wanted}")
    return found[0]


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # a copy on a machine without git
        return subprocess.CompletedProcess(arguments, 127, "", "")


if __name__ == "__main__":
    main()
