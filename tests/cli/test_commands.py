"""The command line, end to end on a tiny model: what it prints, where, and how it fails."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rekindle import Session, __version__
from rekindle.cli.entry import MODULES
from rekindle.cli.main import app
from rekindle.core.reply import TextPiece
from rekindle.errors import OutOfMemory
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.models import registry
from rekindle.models.pull import pull
from rekindle.session import session as session_module
from tests.knowledge.files import pdf

SCRIPT = str(Path(sys.executable).with_name("rekindle"))


def rekindle(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run a command in this process; an error of ours is raised, as `main` would see it."""
    return CliRunner().invoke(app, list(arguments), input=stdin)


def spawn(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the real command in a process of its own."""
    command = [sys.executable, "-m", "rekindle", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, env={**os.environ, **env}, check=False)


def test_run_prints_the_reply_and_keeps_numbers_apart(tiny_folder: Path) -> None:
    result = rekindle("run", str(tiny_folder), "Hello", "-n", "8")
    with Session(tiny_folder) as session:
        expected = session.chat("Hello", max_tokens=8)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    line, advice = result.stderr.splitlines()
    assert re.fullmatch(
        r"model loaded in [\d.]+ s; first token [\d.]+ s; 0 of 23 tokens reused; 8 tokens out, [\d.]+ tokens/s", line
    )
    assert advice == "--daemon would keep the model loaded for the next command."


def test_run_as_json_is_one_object(tiny_folder: Path) -> None:
    result = rekindle("run", str(tiny_folder), "Hello", "-n", "8", "--min-tokens", "8", "--json")
    reply = json.loads(result.stdout)
    assert reply["model"] == "tiny" and len(reply["tokens"]) == 8
    assert reply["usage"]["completion_tokens"] == 8 and reply["finish_reason"] == "length"
    assert set(reply["timings"]) == {"first_token_seconds", "decode_seconds", "tokens_per_second"}


def test_run_takes_every_sampling_option(tiny_folder: Path) -> None:
    options = "-n 9 -t 0.9 --top-k 20 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 4 --stop QQ --stop ZZ"
    result = rekindle("run", str(tiny_folder), "Hello", "--json", *options.split())
    with Session(tiny_folder) as session:
        expected = session.chat(
            "Hello",
            max_tokens=9,
            temperature=0.9,
            top_k=20,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            seed=4,
            stop=["QQ", "ZZ"],
        )
    assert json.loads(result.stdout)["tokens"] == list(expected.tokens)


def test_run_reads_files_and_standard_input(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text("Grüße", "utf-8")
    with Session(tiny_folder) as session:
        both = session.chat("Grüße\n\nWhat?", max_tokens=4).tokens
        raw = session.generate("Hello", max_tokens=4).tokens
        system = session.chat(
            [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}], max_tokens=4
        ).tokens
    base = ["run", str(tiny_folder), "-n", "4", "--json"]

    def tokens(*more: str, stdin: str | None = None) -> tuple[int, ...]:
        return tuple(json.loads(rekindle(*base, *more, stdin=stdin).stdout)["tokens"])

    assert tokens("What?", "-f", str(tmp_path / "doc.txt")) == both
    assert tokens("What?", stdin="Grüße") == both
    assert tokens("What?", "-f", "-", stdin="Grüße") == both
    assert tokens("What?", "-f", str(tmp_path / "doc.txt"), stdin="\n") == both
    (tmp_path / "more.txt").write_text("What?", "utf-8")
    assert tokens("-f", str(tmp_path / "doc.txt"), "-f", str(tmp_path / "more.txt")) == both
    assert tokens("-", stdin="Grüße\n\nWhat?") == both
    assert tokens("-", "-f", str(tmp_path / "doc.txt"), stdin="What?") == both
    assert tokens("-f", str(tmp_path / "doc.txt"), stdin="What?") == both
    assert tokens(stdin="Grüße\n\nWhat?") == both
    assert tokens("Hello", "--raw") == raw
    assert tokens("Hello", "--system", "S") == system


def test_who_keeps_standard_input_open_is_told_that_it_is_read(tiny_gguf: Path) -> None:
    command = [sys.executable, "-m", "rekindle", "run", str(tiny_gguf), "What?", "-n", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stderr is not None
        assert process.stderr.readline().startswith(b"note: reading standard input; Ctrl-D ends it.")
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_prompt_that_is_only_read_ends_without_an_empty_line_and_says_so(tiny_folder: Path) -> None:
    result = rekindle("run", str(tiny_folder), "Hello", "-n", "0")
    assert result.exit_code == 0 and result.stdout == ""
    assert re.search(r"; prompt read in [\d.]+ s; 0 of 23 tokens reused; no reply was wanted$", result.stderr, re.M)


@pytest.mark.parametrize("fails", [False, True])
def test_warnings_and_errors_never_land_in_the_line_of_a_reply(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    decode = session_module.decode

    def warning(*arguments: Any) -> Iterator[TextPiece]:
        waits = True
        for piece in decode(*arguments):
            yield piece
            if waits and str(piece):  # it stands on the screen now
                waits = False
                logging.getLogger("rekindle.session").warning("Drafts are not used.")
        if fails:
            raise OutOfMemory("The device is full.")

    monkeypatch.setattr(session_module, "decode", warning)
    result = rekindle("run", str(tiny_folder), "Hello", "-n", "8", "--min-tokens", "8")
    with Session(tiny_folder) as session:
        said = "" if fails else session.chat("Hello", max_tokens=8, min_tokens=8).text
    assert result.stdout.endswith("\n") and (fails or result.stdout == said + "\n")
    assert f"{result.stdout}note: Drafts are not used.\n" in result.output
    assert isinstance(result.exception, OutOfMemory) is fails


def test_run_reads_documents_as_ingest_does(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "log.pdf").write_bytes(pdf([["Mist at dawn."], ["Calm at dusk."]]))
    (tmp_path / "latin.txt").write_bytes("Grüße\n".encode("latin-1"))
    (tmp_path / "page.html").write_text("<h1>Ships</h1><p>Three <b>sails</b>.</p><script>x</script>")
    (tmp_path / "data.csv").write_text("day,ships\nMonday,3\n")
    with Session(tiny_folder) as session:
        expected = {
            name: session.chat(f"{text}\n\nWhat?", max_tokens=4).tokens
            for name, text in {
                "log.pdf": "Mist at dawn.\n\nCalm at dusk.",
                "latin.txt": "Grüße\n",
                "page.html": "Ships\nThree sails.",
                "data.csv": "day,ships\nMonday,3\n",
            }.items()
        }
    for name, tokens in expected.items():
        done = rekindle("run", str(tiny_folder), "What?", "-f", str(tmp_path / name), "-n", "4", "--json")
        assert json.loads(done.stdout)["tokens"] == list(tokens), name


def test_what_is_left_out_of_a_file_is_a_line_on_standard_error(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "all.mbox").write_bytes(
        b"From a@b Mon Jan  1 10:00:00 2026\nSubject: one\n\nThe lamp is lit.\n\n"
        b"From a@b Mon Jan  1 11:00:00 2026\n\n\n"
    )
    done = rekindle("run", str(tiny_folder), "What?", "-f", str(tmp_path / "all.mbox"), "-n", "2")
    assert done.exit_code == 0 and done.stderr.count("note: ") == 1
    assert f"note: {tmp_path / 'all.mbox'}#2 is empty: it holds no text.\n" in done.stderr


def test_errors_are_one_sentence_and_status_1(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pic.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "scan.pdf").write_bytes(pdf([[]]))
    cases = {
        ("run", "nosuch", "hi"): "Unknown model 'nosuch'",
        ("run", str(tmp_path / "none"), "hi"): "no folder",
        ("run", str(tiny_folder), ""): "empty",
        ("run", str(tiny_folder), "-f", str(tmp_path / "pic.png")): "pic.png is binary, not text",
        ("run", str(tiny_folder), "-f", str(tmp_path / "blank.txt")): "blank.txt is empty: it holds no text.",
        ("run", str(tiny_folder), "-f", str(tmp_path / "scan.pdf")): "has no text, only pictures; run OCR first",
        ("run", str(tiny_folder), "-f", str(tmp_path / "gone.txt")): f"There is no file {tmp_path}",
        ("run", str(tiny_folder), "hi", "-t", "-1"): "temperature=-1.0 is out of range",
        ("run", str(tiny_folder), "hi", "--raw", "--system", "x"): "--raw",
        ("run", str(tiny_folder), "hi", "--device", "tpu"): "device='tpu' is unknown",
        ("run", str(tiny_folder), "hi", "--engine", "magic"): "engine is 'magic'. Use auto, hf, llamacpp or onnx",
        ("run", str(tiny_folder), "x" * 600): "The prompt has 618 tokens, the model's context holds 512. Shorten it.",
        (
            "run",
            str(tiny_folder),
            "x" * 60,
            "--context",
            "50",
        ): "The prompt has 78 tokens, the context is limited to 50. "
        "Shorten it. Or raise --context: the model takes up to 512.",
        ("run", str(tiny_folder), "hi", "--context", "600"): "--context 600 is out of range: this model takes 1 to 512",
        (
            "run",
            str(tiny_folder),
            "hi",
            "--cache",
            str(tmp_path / "blank.txt"),
        ): "or go without a cache: --cache off.",
        ("rm", "nosuch"): "No model 'nosuch' was pulled",
        (
            "rm",
            "ollama:llama3.2",
        ): "ollama:llama3.2 belongs to Ollama. Remove it there, if you want: ollama rm llama3.2",
        ("run", str(tiny_folder), "hi", "--keep-alive", "soon"): "keep_alive='soon' is not a time. Use 30s, 5m, 0",
        ("run", str(tiny_folder), "hi", "--keep-alive", "-x"): "keep_alive='-x' is not a time.",
    }
    for arguments, words in cases.items():
        result = rekindle(*arguments)
        assert result.exit_code == 1 and words in str(result.exception), arguments


def test_main_prints_the_sentence_on_standard_error() -> None:
    done = spawn("run", "nosuch", "hi")
    assert done.returncode == 1 and done.stdout == b""
    assert done.stderr.startswith(b"error: Unknown model") and b"Traceback" not in done.stderr


def test_standard_input_that_is_no_text_is_named(tiny_folder: Path) -> None:
    done = spawn("run", str(tiny_folder), stdin=b"\xff\xfe")
    assert done.returncode == 1 and b"not UTF-8 text: byte 0" in done.stderr


def test_a_reader_that_goes_away_is_no_drama(tiny_gguf: Path) -> None:
    command = f"{sys.executable} -m rekindle run {tiny_gguf} hello -n 200 --min-tokens 200 --threads 1 | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert len(done.stdout) <= 5 and b"Traceback" not in done.stderr


def test_chat_remembers_and_obeys_its_commands(tiny_folder: Path) -> None:
    lines = "/system Be brief.\nHi\n\nAnd now?\n/help\n/clear\nHi\n/bye\nnever\n"
    result = rekindle("chat", str(tiny_folder), "-n", "4", "--json", stdin=lines)
    replies = [json.loads(part) for part in result.stdout.replace("}\n{", "}\x00{").split("\x00")]
    with Session(tiny_folder) as session:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        first = session.chat(turns, max_tokens=4)
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
        second = session.chat(turns, max_tokens=4)
    assert [tuple(r["tokens"]) for r in replies] == [first.tokens, second.tokens, first.tokens]
    assert "/clear starts over" in result.stderr


def test_a_chat_says_what_its_commands_did_and_names_unknown_ones(tiny_folder: Path) -> None:
    result = rekindle("chat", str(tiny_folder), stdin="/system Be brief.\n/system\n/clear\n/quit now\n/help\n")
    said = result.stderr.splitlines()
    assert said[:3] == ["System message set.", "System message removed.", "The conversation starts over."]
    assert said[3].startswith("Unknown command /quit. /system TEXT sets") and said[4].startswith("/system TEXT sets")


def test_the_end_of_input_ends_the_line_on_a_terminal(tiny_folder: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    os.write(ours, b"\x04")  # Ctrl-D
    command = [sys.executable, "-m", "rekindle", "chat", str(tiny_folder)]
    done = subprocess.run(command, stdin=theirs, capture_output=True, check=False)
    assert done.returncode == 0 and done.stderr.endswith(b"\n\n")  # after the help, that of the prompt


def test_a_chat_outgrowing_the_context_goes_on(tiny_folder: Path) -> None:
    lines = "\n".join(["x" * 150] * 5)
    result = rekindle("chat", str(tiny_folder), "-n", "8", stdin=lines)  # two may be half a character
    assert result.exit_code == 0 and "oldest messages left out" in result.stderr
    result = rekindle("chat", str(tiny_folder), "-n", "2", stdin="x" * 600 + "\nhi\n")
    assert "error: The prompt has" in result.stderr and "2 tokens out" in result.stderr


def test_models_are_pulled_listed_and_removed(tiny_folder: Path) -> None:
    assert "not pulled" in rekindle("list").stdout
    assert rekindle("pull", str(tiny_folder)).stdout.startswith("tiny: ready (")
    (entry,) = json.loads(rekindle("list", "--json").stdout)
    assert entry["name"] == "tiny" and entry["in_place"] and entry["bytes"] > 1000
    assert rekindle("run", "tiny", "hi", "-n", "1").exit_code == 0
    assert "its files stay" in rekindle("rm", "tiny").stdout
    assert json.loads(rekindle("list", "--json").stdout) == []
    (pulled,) = json.loads(rekindle("pull", str(tiny_folder), "--json").stdout)
    assert pulled["name"] == "tiny"


def test_exported_graphs_are_listed_with_their_sizes_and_go_with_the_model(tiny_folder: Path) -> None:
    entry = pull(str(tiny_folder))
    before = entry.size_bytes()
    graph = registry.exported_folder(entry.files, "onnx-int4")
    graph.mkdir(parents=True)
    (graph / "model.onnx").write_bytes(bytes(3000))
    (listed,) = json.loads(rekindle("list", "--json").stdout)
    assert listed["graphs"] == {"onnx-int4": 3000} and listed["bytes"] == before + 3000
    printed = rekindle("list").stdout
    assert "onnx-int4" in printed and re.search(r"graph\s+3\.0\s+kB\s+exported", printed)
    rekindle("rm", "tiny")
    assert not graph.exists() and tiny_folder.is_dir()


def test_doctor_says_which_models_nobody_calibrated(tiny_folder: Path) -> None:
    assert rekindle("pull", str(tiny_folder)).exit_code == 0
    assert json.loads(rekindle("doctor", "--json").stdout)["calibrated"] == {"tiny": []}
    assert "nothing: rekindle calibrate tiny" in " ".join(rekindle("doctor").stdout.split())
    JsonMemo(home_folder() / "calibrated.json", 9).keep("tiny", ["quantized KV"])
    assert json.loads(rekindle("doctor", "--json").stdout)["calibrated"] == {"tiny": ["quantized KV"]}


def test_doctor_tells_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads(rekindle("doctor", "--json").stdout)
    assert facts["rekindle"] == __version__ and facts["cores"] >= 1 and facts["memory_bytes"] > 0
    assert facts["engines"]["hf"] == "ready" and facts["engines_ready"]
    if importlib.util.find_spec("xllamacpp") is None:
        assert "pip install 'rekindle-llm[llamacpp,knowledge]'" in facts["engines"]["llamacpp"]
    else:
        assert facts["engines"]["llamacpp"] == "ready" and "CPU" in facts["choices"]["llamacpp: built with"]
    if importlib.util.find_spec("onnxruntime") is None:
        assert "pip install 'rekindle-llm[onnx]'" in facts["engines"]["onnx"]
    else:
        assert facts["engines"]["onnx"] == "ready"
        assert "cpu (tested)" in facts["choices"]["onnx: execution providers"]
    assert " on " in facts["choices"]["hf: float32 weights"]
    assert "package: torch" in rekindle("doctor").stdout


def test_doctor_and_run_say_how_to_get_an_engine(tiny_folder: Path, tmp_path: Path) -> None:
    """An environment without engines: everything that does not need it works, the rest says what to install."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "hidden, real = ('torch', 'transformers', 'xllamacpp', 'llama_cpp', 'onnxruntime'), importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in hidden else real(name, *rest)\n"
        "sys.modules.update(dict.fromkeys(hidden))\n"  # importing one raises ModuleNotFoundError
    )
    for arguments, words in {
        ("doctor",): b"pip install 'rekindle-llm[llamacpp,knowledge]'",
        ("run", str(tiny_folder), "hi"): b"pip install 'rekindle-llm[hf]'",
    }.items():
        done = spawn(*arguments, PYTHONPATH=str(tmp_path))
        assert done.returncode == 1 and words in done.stderr and b"Traceback" not in done.stderr, arguments
    done = spawn("pull", str(tiny_folder), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and b"note: " in done.stderr
    assert spawn("list", PYTHONPATH=str(tmp_path)).returncode == 0


def test_version_and_help() -> None:
    assert rekindle("--version").stdout == f"rekindle {__version__}\n"
    for command in ("run", "chat", "pull", "list", "rm", "doctor"):
        assert command in rekindle("--help").stdout
        assert rekindle(command, "--help").exit_code == 0


def test_shells_complete_commands_and_models(tiny_folder: Path) -> None:
    rekindle("pull", str(tiny_folder))

    def complete(words: str) -> list[bytes]:
        count = str(len(words.split(" ")) - 1)
        env = {**os.environ, "_REKINDLE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
        return subprocess.run([SCRIPT], env=env, capture_output=True, check=False).stdout.split()

    assert complete("rekindle do") == [b"doctor"]
    assert complete("rekindle run ") == [b"minilm", b"smollm2", b"tiny"]
    assert complete("rekindle run ti") == [b"tiny"]


def test_every_command_is_found_in_its_own_module() -> None:
    alone = {one.name or one.callback.__name__: one.callback.__module__ for one in app.registered_commands}
    for group in app.registered_groups:
        (alone[group.name],) = {one.callback.__module__ for one in group.typer_instance.registered_commands}
    assert {name: f"rekindle.cli.{module}" for name, module in MODULES.items()} == alone


def test_importing_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "typer", "rich", "httpx", "tokenizers")
    code = f"import sys, rekindle; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
    heavy = tuple(name for name in heavy if name not in ("typer", "rich"))
    code = f"import sys, rekindle.cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
