"""`make demo`: every text is checked, and what it says was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tools import demo

ROOT = Path(__file__).parents[2]
RULES = "Be brief, and polite to everybody who asks. " * 2
NOT_INSTALLED = ("torch", "transformers", "safetensors", "gguf", "lxml", "docx", "matplotlib", "scipy")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model in place of the embedded one."""
    pytest.importorskip("xllamacpp")
    from tests.tiny_gguf import write_llama

    path = str(write_llama(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(demo, "MODEL", path)
    return path


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions one after the other in place of processes: these learn what loading costs, and compute what is tiny."""

    def run(folder: str, jobs: list[demo.Job], damaged: str | None = None) -> list[demo.Answered]:
        task = {"model": demo.MODEL, "folder": folder, "jobs": jobs, "damaged": damaged}
        return demo.run_jobs(**json.loads(json.dumps(task)))

    monkeypatch.setattr(demo, "in_new_process", run)


def reply(tokens: list[int], *, seconds: float = 1.0, cached: int = 0) -> demo.Answered:
    return {"tokens": tokens, "seconds": seconds, "cached": cached, "size": 8, "text": "", "source": None}


@pytest.mark.llamacpp
@pytest.mark.usefixtures("tiny", "one_process")
def test_kept_kv_is_reused_and_damaged_or_foreign_kv_is_not(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    chat, safety = (part(folder, RULES) for part in (demo.chat, demo.safety))
    rows = {row.name: row for row in [*chat.rows, *safety.rows]}
    assert all(row.same == len(row.replies) for row in rows.values())
    computed = {name for name, row in rows.items() if not any(one["cached"] for one in row.replies)}
    assert computed == {"llama.cpp alone, restarted", "Rekindle, cold", "one bit flipped on disk", "other cache_salt"}


@pytest.mark.llamacpp
def test_a_new_process_of_the_demo_imports_only_what_the_demo_installs(tiny: str) -> None:
    task = {"model": tiny, "folder": "off", "jobs": [(demo.talk(RULES, "Why?"), {})], "damaged": None}
    code = f"""import json, sys; from tools import demo
demo.run_jobs(**json.loads({json.dumps(task)!r}))
print(*({set(NOT_INSTALLED)!r} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.real
@pytest.mark.long
@pytest.mark.llamacpp
def test_the_whole_demo_runs_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "COLD_SECONDS", 0.5)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.chdir(ROOT)
    demo.main()
    printed = capsys.readouterr().out
    for part in (demo.chat, demo.safety, demo.documents, demo.adapters):
        assert f"\n{part.__doc__}\n" in printed
    assert not list(tmp_path.iterdir())
    assert "16 March" in printed and "█" in printed and "torch" not in printed


@pytest.mark.parametrize(("tokens", "fails"), [([1, 2], False), ([1, 3], True)])
def test_the_demo_fails_where_a_text_differs(
    tokens: list[int], fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(*_: Any) -> demo.Part:
        """Part: shows a row."""
        return demo.Part("Part", [demo.Row("row", [reply(tokens)], [reply([1, 2])], drawn=True)])

    for name in ("chat", "safety", "documents", "adapters"):
        monkeypatch.setattr(demo, name, part)
    monkeypatch.setattr(demo, "choose_rules", lambda: RULES)
    monkeypatch.setattr(sys, "argv", ["demo"])
    if not fails:
        demo.main()
    else:
        with pytest.raises(SystemExit, match="differ"):
            demo.main()
    assert ("0 of 1" if fails else "1 of 1") in capsys.readouterr().out


def test_a_bar_is_as_long_as_its_share_and_always_visible() -> None:
    assert demo.bar(1) == "█" * demo.BAR_CELLS
    assert demo.bar(0.5) == "█" * (demo.BAR_CELLS // 2)
    assert demo.bar(1e-6) == "▏"
    assert all(len(demo.bar(share / 100)) <= demo.BAR_CELLS for share in range(101))


def test_lines_that_say_what_a_part_shows_fit_a_terminal() -> None:
    for part in (demo.chat, demo.safety, demo.documents, demo.adapters):
        assert part.__doc__ is not None and ": " in part.__doc__ and len(part.__doc__) <= 80
