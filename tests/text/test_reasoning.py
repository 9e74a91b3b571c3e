"""Thoughts, text and tool calls of a reply, however it is cut into pieces; markers that are control tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from rekindle.core.request import Message, Request, Think
from rekindle.engine.fake import ByteTokenizer
from rekindle.text.chat_template import make_renderer
from rekindle.text.detokenize import Detokenizer
from rekindle.text.reasoning import (
    ParsedReply,
    ReplyParser,
    detect_thoughts,
    has_think_switch,
    reply_markers,
    thought_for_template,
)
from rekindle.text.tokenizer import HfTokenizer
from tests.tiny import byte_backend

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CHAT = [{"role": "user", "content": "Wind?"}]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING = "{% if tools %}<tool_call>{% endif %}<think></think>"
HARMONY = "{% if tools %}x{% endif %}<|start|>assistant<|channel|>final<|message|>"
GEMMA = "{% if tools %}<|tool_call>{% endif %}<|channel>thought"
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}[THINK]"
ANALYSIS, TURN = "<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant"


class Templated(ByteTokenizer):
    """Bytes, and a template that only tells how replies look."""

    def __init__(self, template: str, begins_thought: bool = False) -> None:
        self.template = template
        self._begins_thought = begins_thought

    def begins_thought(self, think: Think | None = None) -> bool:
        return self._begins_thought


def parsed(template: str, reply: str, size: int, *, begun: bool = False, **options: Any) -> tuple[str, str, list[Any]]:
    request = Request.of(CHAT, **{"tools": [WEATHER], **options})
    parser = ReplyParser(request, Templated(template, begun))
    parts: list[ParsedReply] = [parser.add(reply[at : at + size]) for at in range(0, len(reply), size)]
    parts.append(parser.finish())
    calls = [(delta.call.name, json.loads(delta.call.arguments)) for part in parts for delta in part.calls]
    return "".join(part.thinking for part in parts), "".join(part.content for part in parts), calls


OSLO = [("weather", {"city": "Oslo"})]
CASES: list[tuple[str, str, bool, tuple[str, str, list[Any]]]] = [
    (THINKING, "<think>\nHm.\n\nSo.\n</think>\n\nCalm.\n\nVery.", False, ("Hm.\n\nSo.", "Calm.\n\nVery.", [])),
    (THINKING, "\n<think>Hm.</think>Calm.", False, ("Hm.", "Calm.", [])),
    (THINKING, "<think>\n\n</think>\n\nCalm.", False, ("", "Calm.", [])),
    (THINKING, "Hm.\n</think>\n\nCalm.", True, ("Hm.", "Calm.", [])),
    (THINKING, "<think>Hm. It never ends", False, ("Hm. It never ends", "", [])),
    (THINKING, f"<think>Like {HERMES_CALL}?</think>{HERMES_CALL}", False, (f"Like {HERMES_CALL}?", "", OSLO)),
    (THINKING, "Write <think> first, </think> last.", False, ("", "Write <think> first, </think> last.", [])),
    (THINKING, "<thin ice>", False, ("", "<thin ice>", [])),
    (THINKING, "<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>", [])),
    (MISTRAL, '[THINK]Hm.[/THINK]Look.[TOOL_CALLS]weather{"city": "Oslo"}', False, ("Hm.", "Look.", OSLO)),
    (GEMMA, "<|channel>thought\nHm.\n<channel|>Calm.", False, ("Hm.", "Calm.", [])),
    (GEMMA, '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', False,
     ("Hm.", "", OSLO)),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>a "b", {c: d}<|"|>,days:3,on:[true,{x:<|"|><|"|>}]}<tool_call|>', False,
     ("", "", [("weather", {"city": 'a "b", {c: d}', "days": 3, "on": [True, {"x": ""}]})])),
    (GEMMA, "<|tool_call>call:weather{}<tool_call|><|tool_call>call:weather{city:1}", False,
     ("", "", [("weather", {}), ("weather", {"city": 1})])),
    (GEMMA, "<|tool_call>call:other{}<tool_call|>", False, ("", "<|tool_call>call:other{}<tool_call|>", [])),
    (HARMONY, f"{ANALYSIS}{TURN}<|channel|>final<|message|>Calm.", False, ("Hm.", "Calm.", [])),
    (HARMONY, "<|channel|>final<|message|>Calm.", False, ("", "Calm.", [])),
    (HARMONY, f"{ANALYSIS}{TURN}<|channel|>commentary<|message|>I look.<|end|>{TURN}<|channel|>commentary "
     'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}', False, ("Hm.", "I look.", OSLO)),
    (HARMONY, f'{ANALYSIS}{TURN} to=functions.weather<|channel|>commentary json<|message|>{{"city": "Oslo"}}', False,
     ("Hm.", "", OSLO)),
    ("{{ messages }}", "<think>Hm.</think>Calm.", False, ("", "<think>Hm.</think>Calm.", [])),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("template", "reply", "begun", "expected"), CASES)
def test_parts_of_a_reply(
    template: str, reply: str, begun: bool, expected: tuple[str, str, list[Any]], size: int
) -> None:
    assert parsed(template, reply, size, begun=begun) == expected


def test_a_forced_reply_is_no_thought() -> None:
    forced = parsed(THINKING, HERMES_CALL, 5, begun=True, tool_choice="required")
    assert forced == ("", "", OSLO)


def test_plain_prompts_are_continued_as_they_are() -> None:
    parser = ReplyParser(Request.of("Once"), Templated(THINKING))
    assert (parser.add("<think>a</think>"), parser.finish()) == (ParsedReply("", "<think>a</think>"), ParsedReply())


@pytest.mark.parametrize(
    ("ending", "begins"), [("<think>\\n", True), ("<think>\\n\\n</think>\\n\\n", False), ("", False)]
)
def test_a_prompt_that_ends_inside_a_thought_is_noticed(ending: str, begins: bool) -> None:
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{{# </think> #}}{{{{ '{ending}' }}}}"
    assert real(template).begins_thought() is begins


SWITCHED = """{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>
{%- else %}<think>{{ reasoning_effort }}{% endif %}"""


def test_whether_to_think_is_passed_to_a_template_that_reads_it() -> None:
    tokenizer, chat = real(SWITCHED), [Message("user", "x")]
    assert has_think_switch(SWITCHED) and not has_think_switch("{{ message.thinking }}")
    assert tokenizer.begins_thought() and tokenizer.begins_thought(True) and not tokenizer.begins_thought(False)
    written = {think: tokenizer.decode(tokenizer.encode_chat(chat, think=think)) for think in (None, False, "low")}
    assert written == {None: "x<think>", False: "x<think></think>", "low": "x<think>low"}
    quoting = tokenizer.encode_quoting(chat, ["q"], think=False)
    assert tokenizer.decode(quoting.after) == "x<think></think>"


def real(template: str, *special: str) -> HfTokenizer:
    backend = byte_backend()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    return HfTokenizer(
        backend, render=make_renderer(template, "", ""), stop_ids=frozenset(),
        vocabulary_size=backend.get_vocab_size(), template=template,
    )  # fmt: skip


def test_control_tokens_that_mark_thoughts_are_shown_and_others_are_not() -> None:
    tokenizer = real("{{ messages }}<|channel>thought", "<|channel>", "<channel|>", "<|image>")
    marks = reply_markers(tokenizer)
    assert sorted(marks.values()) == ["<channel|>", "<|channel>"]
    text = Detokenizer(tokenizer, (), marks)
    tokens = [tokenizer.token_of(mark) for mark in ("<|channel>", "<|image>", "<channel|>")]
    assert None not in tokens
    opened, image, closed = (token for token in tokens if token is not None)
    written = [opened, *tokenizer.encode("hä"), image, closed, *tokenizer.encode("ö")]
    assert "".join([*map(text.add, written), text.finish()]) == "<|channel>hä<channel|>ö"
    assert tokenizer.decode(written) == "häö" and reply_markers(real("{{ messages }}", "<|channel>")) == {}


@pytest.mark.parametrize(
    ("template", "message", "named"),
    [
        ("{{ message.thinking }}", {}, {"thinking": "Hm."}),
        ("{{ message['reasoning'] }}", {}, {"reasoning": "Hm."}),
        ("{{ message.reasoning_content }}", {}, {}),
        ("{{ message.thinking }}", {"content": "I look.", "tool_calls": [1]}, {}),
        ("{{ message.thinking }}", {"content": "", "tool_calls": [1]}, {"thinking": "Hm."}),
    ],
)
def test_a_replayed_thought_has_the_name_that_the_template_reads(
    template: str, message: dict[str, Any], named: dict[str, str]
) -> None:
    given = {"role": "assistant", "content": "Calm.", "reasoning_content": "Hm.", **message}
    assert thought_for_template(given, template) == {**given, **named}
    assert thought_for_template({"role": "user"}, template) == {"role": "user"}


def test_families_are_told_apart() -> None:
    styles = [detect_thoughts(template) for template in (THINKING, HARMONY, GEMMA, MISTRAL)]
    assert None not in styles and len(set(styles)) == 4 and detect_thoughts("{{ messages }}") is None
