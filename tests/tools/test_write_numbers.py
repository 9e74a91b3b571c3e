"""Pages have no number that a file in docs/numbers does not have, and say which numbers are older than their code."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from benchmarks import charts
from benchmarks.__main__ import BENCHES
from tools import write_numbers
from tools.write_numbers import KEPT, MAX_ROWS, MEASURED, PAGE, PAGES, ROOT, filled, kept, numbers_page, state

_AGE = re.compile(r"[\d-]{10}, (\*\*stale\*\*|current)|on an unknown day, \*unknown\*|[\d-]{10}, \*unknown\*")
# What a measurement looks like: a share, a ratio, a time or a speed.
_MEASUREMENT = re.compile(r"\b\d[\d.,]*(?: ?%| ?m?s\b|x\b| times\b| tokens/s| [MG]B/s| us\b)")
# What looks like one and is a limit or a default of the code.
_CONSTANTS = {
    "guide/server": {"15 s", "10 s", "30 s"},  # waits of a server that stops
    "concepts/architecture": {"2 s"},  # for any header of a file
    "concepts/cache": {"0.25 s", "1 s", "10 s", "1.1 times"},  # deadlines, and the margin of a plan
    "concepts/capacity": {"80 %", "70 %", "4.4 GB/s"},  # assumptions; the last is compared by test_capacity.py
    "concepts/server": {"5 ms", "250 ms", "1 s"},  # how long a step waits for others, and a piece of a prompt takes
    "concepts/streaming": {"1.5 %", "0.2 s"},  # before computing starts
    "concepts/threats": {"0.2 s", "1.2 times", "1.5 s", "2 s", "50 ms"},  # promised limits
}


def _without_age(text: str) -> str:
    """A clone may have no history, and code changes after a page was written."""
    return _AGE.sub("AGE", text)


def test_the_page_of_numbers_is_what_the_files_say() -> None:
    assert _without_age(PAGE.read_text("utf-8")) == _without_age(numbers_page()), "old: write_numbers --pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_numbers_of_other_pages_are_what_the_files_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert _without_age(filled(text)) == _without_age(text), "old: write_numbers --pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_no_measurement_stands_on_a_page_without_its_file(page: Path) -> None:
    text = re.sub(
        r"<!-- = \S.*?<!-- = -->|```.*?```|`[^`]*`|\(published: [^)]*\)", "", page.read_text("utf-8"), flags=re.DOTALL
    )
    name = f"{page.parent.name}/{page.stem}"
    assert [found for found in _MEASUREMENT.findall(text) if found not in _CONSTANTS.get(name, ())] == []


def test_the_page_is_short_and_begins_each_bench_with_its_charts() -> None:
    page = PAGE.read_text("utf-8")
    assert len(page.splitlines()) <= 320
    for part in page.split("\n## ")[1:]:
        name = part.split("\n", 1)[0]
        assert len(re.findall(r"^\|", part, re.MULTILINE)) - 2 <= MAX_ROWS, name
        assert part.split("\n")[2].startswith("![") or name not in BENCHES, name
    for stem, result in kept().items():
        commands = [run["command"] for run in result.get("measured_by", [result])]
        assert f"(numbers/{stem}.json)" in page and all(f"`{command}`" in page for command in commands), stem


def test_everything_measured_is_named_and_every_headline_is_there() -> None:
    assert {result["bench"] for result in kept().values()} <= set(MEASURED) and set(BENCHES) <= set(MEASURED)
    for bench in MEASURED:
        measures = [row["measure"] for one in kept().values() if one["bench"] == bench for row in one["table"]]
        for wanted in write_numbers.headlines(bench):
            assert any(fnmatchcase(measure, wanted) for measure in measures), f"{bench}: {wanted}"
        for path in write_numbers.code(bench):
            assert (ROOT / path).exists(), f"{bench}: {path}"


@pytest.mark.parametrize("stem", kept())
def test_labels_of_a_chart_stay_inside_their_frames(stem: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    result = kept()[stem]
    if result["bench"] not in BENCHES:
        return
    assert (KEPT / f"{stem}.png").is_file()
    figure = charts.draw([(panel, result) for panel in charts.panels_of(result)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        frame = axes.get_window_extent()
        inside = [*axes.texts, *([axes.get_legend()] if axes.get_legend() else [])]
        for label in inside:
            box = label.get_window_extent(canvas.get_renderer())
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1, label
        edge = axes.get_tightbbox(canvas.get_renderer())
        assert edge.x0 >= 0 and edge.x1 <= figure.bbox.x1 and edge.y0 >= 0 and edge.y1 <= figure.bbox.y1


def test_a_number_is_stale_when_its_code_changed_and_unknown_without_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_numbers, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    own = tmp_path / "src" / "rekindle" / "store" / "disk.py"
    own.parent.mkdir(parents=True)
    assert state("store", "abc") == "*unknown*"

    own.write_text("first")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("another file")
    assert state("store", "HEAD") == "current"
    own.write_text("second")
    assert state("store", "HEAD") == "**stale**"
    assert state("store", "0123456") == state("store", "") == "*unknown*"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert state("store", "HEAD") == "*unknown*"


def test_a_marked_number_comes_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"measure": "a", "ours": "1"}, {"measure": "b", "ours": "2"}]
    monkeypatch.setattr(write_numbers, "kept", lambda: {"file": {"a": {"0.25": 0.127}, "table": rows}})
    text = "so <!-- = file a/0.25 .0% -->old<!-- = --> and <!-- = file a/0.25 ms --><!-- = -->"
    assert filled(text) == "so <!-- = file a/0.25 .0% -->13%<!-- = --> and <!-- = file a/0.25 ms -->127 ms<!-- = -->"
    assert "| measure | ours |\n|---|---|\n| a | 1 |\n| b | 2 |" in filled("<!-- = file table --><!-- = -->")
    assert filled("<!-- = file table/measure=b/ours --><!-- = -->") == "<!-- = file table/measure=b/ours -->2<!-- = -->"
    for wrong in ("gone", "table/measure=c/ours", "table/measure=b/theirs"):
        with pytest.raises(KeyError):
            filled(f"<!-- = file {wrong} --><!-- = -->")


def test_what_several_runs_measured_says_so() -> None:
    runs = [
        {"command": "python -m benchmarks answers --part 1/2"},
        {"command": "python -m benchmarks answers --part 2/2"},
    ]
    pooled = write_numbers.commands({"command": "python -m benchmarks answers --minutes 0", "measured_by": runs})
    assert pooled.startswith("pooled from 2 runs: `") and "--part 1/2`; `" in pooled and "--minutes 0" not in pooled
    assert write_numbers.commands({"command": "python -m benchmarks text"}) == "`python -m benchmarks text`"
