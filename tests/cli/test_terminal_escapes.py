"""A model's text reaches a terminal without the control characters that terminals obey."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from rekindle.cli.options import print_json
from rekindle.cli.runner import ReplyPrinter

PIECES = ("Hi\t\x1b", "]52;c;cm0gLXJm", "\x07\nthere \x9b", "2J \x1b[31mred\x7f \u202etxt")  # clipboard, screen, colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed_on(monkeypatch: pytest.MonkeyPatch, output: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stdout", output)
    with ReplyPrinter(time.perf_counter(), silent=False) as printer:
        for piece in PIECES:
            printer.take({"text": piece})
    assert printer.text == "".join(PIECES)  # the next turn of a chat gets what the model wrote
    return output.getvalue()


def test_a_terminal_gets_names_for_control_characters_also_of_an_escape_in_two_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = printed_on(monkeypatch, Terminal())
    assert shown.startswith("Hi\t⟨U+001B⟩]52;c;cm0gLXJm⟨U+0007⟩\nthere ⟨U+009B⟩2J ⟨U+001B⟩[31mred⟨U+007F⟩ ")
    assert not {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"} & {*shown}


def test_a_file_or_a_pipe_gets_what_the_model_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed_on(monkeypatch, io.StringIO()) == "".join(PIECES) + "\n"


def test_json_holds_no_control_character_and_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_json({"text": "".join(PIECES)})
    assert not {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"} & {*terminal.getvalue()}
    assert json.loads(terminal.getvalue()) == {"text": "".join(PIECES)}
