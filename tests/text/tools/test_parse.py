"""Calls told apart from text while a reply arrives, and replies that are forced to be calls."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.tools import Tool, ToolChoice
from rekindle.text.tools import styles as toolstyle
from rekindle.text.tools.parse import ToolParser
from rekindle.text.tools.styles import ToolStyle, call_grammar, detect_style

STYLES = {
    style.name: style
    for style in (
        toolstyle.HERMES,
        toolstyle.QWEN_XML,
        toolstyle.LLAMA,
        toolstyle.MISTRAL,
        toolstyle.FUNCTIONARY,
        toolstyle.DEEPSEEK,
        toolstyle.BAR,
        toolstyle.COMMAND,
        toolstyle.GENERIC,
    )
}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
TOOLS = (
    Tool("look", "Look at a place.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}),
    Tool("look_up"),
    Tool(
        "add",
        None,
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"$ref": "#/$defs/node"}},
            "required": ["a", "b"],
            "$defs": {"node": NODE},
        },
    ),
)
LOOK = ("look", {"at": "Oslo"})
ADD = ("add", {"a": 1, "b": 2})

Calls = list[tuple[str, Any]]

# style, reply, what is text in it, what is called
GOLDEN: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {"at": "Oslo"}}\n</tool_call>', "", [LOOK]),
    ("hermes", 'Let me see.\n<tool_call>{"name": "look", "arguments": {"at": "Oslo"}}', "Let me see.", [LOOK]),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"at": "Oslo"}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n</tool_call>\n',
        "",
        [LOOK, ADD],
    ),
    ("hermes", 'A\n<tool_call>{"name": "look_up"}</tool_call>\n\nB\n', "A\n\nB\n", [("look_up", {})]),
    ("hermes", '{"name": "look", "arguments": {"at": "Oslo"}}', "", [LOOK]),
    ("hermes", '```json\n{"name": "look", "arguments": {"at": "Oslo"}}\n```', "", [LOOK]),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"Oslo\\"}"}</tool_call>', "", [LOOK]),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"at": "}{</tool_call> \\" \\\\", "deep": [{"x": [[]]}]}}',
        "",
        [("look", {"at": '}{</tool_call> " \\', "deep": [{"x": [[]]}]})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"at": "\\u00c5s \\ud83d\\ude00 Ås"}}',
        "",
        [("look", {"at": "Ås 😀 Ås"})],
    ),
    ("hermes", '<tool_call>{"a"<tool_call>{"name": "look_up"}', '<tool_call>{"a"', [("look_up", {})]),
    ("qwen-xml", "<tool_call><function=look><parameter=at>Oslo</parameter>\n</function>\n</tool_call>", "", [LOOK]),
    (
        "qwen-xml",
        "So:<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>",
        "So:",
        [ADD],
    ),
    ("qwen-xml", "<function=look>\n<parameter=at>\n12\n</parameter>\n", "", [("look", {"at": "12"})]),
    ("llama", '{"name": "look", "parameters": {"at": "Oslo"}}', "", [LOOK]),
    (
        "llama",
        '<|python_tag|>{"name": "look", "parameters": {"at": "Oslo"}}; {"name": "add", "parameters": {"a": 1, "b": 2}}',
        "",
        [LOOK, ADD],
    ),
    ("llama", '{"type": "function", "name": "look", "parameters": {"at": "Oslo"}}', "", [LOOK]),
    ("llama", '{"type": "function", "function": {"name": "look", "parameters": {"at": "Oslo"}}}', "", [LOOK]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "Oslo"}}, {"name": "look_up", "arguments": {}}]',
        "",
        [LOOK, ("look_up", {})],
    ),
    ("mistral", '[{"name": "look", "arguments": {"at": "Oslo"}, "id": "abcdefghi"}]', "", [LOOK]),
    ("mistral", 'Well. [{"name": "look", "arguments": {"at": "Oslo"}}]', "Well.", [LOOK]),
    ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "Oslo"}[TOOL_CALLS]look_up[ARGS]{}', "", [LOOK, ("look_up", {})]),
    ("mistral", 'look{"at": "Oslo"}look_up{}', "", [LOOK, ("look_up", {})]),
    ("mistral", 'I look.look{"at": "Oslo"}', "I look.", [LOOK]),
    ("mistral", 'look[CALL_ID]abcdefghi[ARGS]{"at": "Oslo"}', "", [LOOK]),
    ("mistral", 'lookabcdefghi{"at": "Oslo"}', "", [LOOK]),
    ("functionary", '<function=look>{"at": "Oslo"}</function><function=look_up>{}', "", [LOOK, ("look_up", {})]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"at": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [LOOK, ADD],
    ),
    ("bar", '<|tool_call|>[{"name": "look", "arguments": {"at": "Oslo"}}]<|/tool_call|>', "", [LOOK]),
    (
        "command",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "Oslo"}}]<|END_ACTION|>',
        "",
        [LOOK],
    ),
    ("generic", '{"tool_call": {"name": "look", "arguments": {"at": "Oslo"}}}', "", [LOOK]),
    ("generic", 'look {"at": "Oslo"}', "", [LOOK]),
]

# Replies without a call: every letter of them is text.
PLAIN: list[tuple[str, str]] = [
    ("hermes", ""),
    ("hermes", "  \n"),
    ("hermes", "\n\nHello <tool_call world> <tool\n"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "Oslo",}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'look', 'arguments': {}}</tool_call> sorry"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "Oslo"}</tool_call> and on'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "Os'),
    ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>" * 3),
    ("hermes", "<tool_call>" + '{"name":' * 70 + "1" + "}" * 70),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("hermes", '{"name": "look"}'),
    ("hermes", '{"name": "Bob", "arguments": {}}'),
    ("hermes", '{"answer": 42}'),
    ("hermes", "[1, 2]"),
    ("hermes", "[]"),
    ("hermes", "```json\n{}\n```"),
    ("hermes", 'Say {"name": "look", "arguments": {"at": "Oslo"}}.'),
    ("qwen-xml", "<tool_call>\n<function=unknown>\n<parameter=at>\nOslo\n</parameter>\n</function>"),
    ("qwen-xml", "<tool_call>\n<function=look>\nat Oslo\n</function>\n</tool_call>"),
    ("qwen-xml", "<function=lo"),
    ("llama", '<|python_tag|>look.call(at="Oslo")'),
    ("llama", '{"name": "look", "parameters": "Oslo"}'),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {}}, {"name": "unknown", "arguments": {}}]'),
    ("mistral", 'outlook{"at": "Oslo"} overlook{}'),
    ("mistral", "look around [{ here"),
    ("mistral", "look"),
    ("functionary", "<function=look>{broken}</function>"),
    ("deepseek", "<｜tool▁call▁begin｜>function"),
    ("bar", "<|tool_call|>[]<|/tool_call|>"),
    ("generic", "lookout"),
]


def parse(style: ToolStyle, pieces: list[str]) -> tuple[str, Calls]:
    """All text and all calls of a reply that arrives in pieces."""
    parser = ToolParser(style, TOOLS)
    parsed = [*(parser.add(piece) for piece in pieces), parser.finish()]
    deltas = [delta for part in parsed for delta in part.calls]
    assert [delta.index for delta in deltas] == list(range(len(deltas))) and parser.count == len(deltas)
    assert len({delta.call.id for delta in deltas}) == len(deltas)
    calls = [(delta.call.name, json.loads(delta.call.arguments)) for delta in deltas]
    return "".join(part.content for part in parsed), calls


@pytest.mark.parametrize(("style", "reply", "content", "calls"), GOLDEN)
def test_calls_are_found_however_the_reply_is_cut(style: str, reply: str, content: str, calls: Calls) -> None:
    expected = (content, calls)
    assert parse(STYLES[style], [reply]) == expected
    assert parse(STYLES[style], list(reply)) == expected
    for cut in range(1, len(reply)):
        assert parse(STYLES[style], [reply[:cut], reply[cut:]]) == expected, cut


@pytest.mark.parametrize(("style", "reply"), PLAIN)
def test_what_is_no_call_is_text_to_the_last_letter(style: str, reply: str) -> None:
    assert parse(STYLES[style], [reply]) == (reply, [])
    assert parse(STYLES[style], list(reply)) == (reply, [])
    for cut in range(1, min(len(reply), 100)):
        assert parse(STYLES[style], [reply[:cut], reply[cut:]]) == (reply, [])


BITS = [
    *(mark for style in STYLES.values() for mark in (*style.opens, *style.closes, *style.joints)),
    '{"name": "look", "arguments": {"at": "Oslo"}}', '{"name": "no", "arguments": {}}', "look", "look{}", "look_up",
    "{", "}", "[", "]", "[{", '"', '{"name": "', '{"na', ",", ";", " ", "\n", "x", "é", "```json", "<", "<tool",
    "abcdefghi", "<parameter=at>", "</parameter>", "add>", "\\",
]  # fmt: skip
replies = st.lists(st.sampled_from(BITS), max_size=9).map("".join) | st.text(max_size=30)


@given(replies, st.sampled_from(sorted(STYLES)), st.data())
def test_a_reply_in_pieces_gives_what_it_gives_as_a_whole(reply: str, style: str, data: st.DataObject) -> None:
    whole = parse(STYLES[style], [reply])
    assert parse(STYLES[style], list(reply)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=4)))
    edges = [0, *cuts, len(reply)]
    assert parse(STYLES[style], [reply[a:b] for a, b in pairwise(edges)]) == whole
    if not whole[1]:
        assert whole[0] == reply, "without a call, nothing is left out"


@pytest.mark.parametrize("style", sorted(STYLES))
def test_text_is_given_out_as_soon_as_it_is_certain(style: str) -> None:
    parser = ToolParser(STYLES[style], TOOLS)
    words = ["Hi", " to", " you", " <b>", " {", "x}"]
    given = [parser.add(word).content for word in words]
    assert given == ["Hi", " to", " you", " <b>", " {", "x}"]


def test_json_that_is_no_call_does_not_wait_for_its_end() -> None:
    parser = ToolParser(toolstyle.HERMES, TOOLS)
    assert parser.add('{"na').content == ""
    assert parser.add('pkin": ').content.startswith('{"napkin"')
    parser = ToolParser(toolstyle.HERMES, TOOLS)
    assert parser.add('{"name": "B').content == '{"name": "B'


def test_a_call_comes_with_its_last_brace() -> None:
    parser = ToolParser(toolstyle.HERMES, TOOLS, new_id=lambda: "abc")
    assert parser.add('<tool_call>{"name": "look", "arguments": { "at" : 1.0}').calls == ()
    (delta,) = parser.add("}").calls
    assert delta.as_openai() == {
        "index": 0, "id": "abc", "type": "function", "function": {"name": "look", "arguments": '{ "at" : 1.0}'},
    }  # fmt: skip


def test_a_long_call_is_read_once_however_many_pieces_it_has() -> None:
    reply = '<tool_call>{"name": "look", "arguments": {"at": "' + "x\\n" * 30_000 + '"}}'
    parser = ToolParser(toolstyle.HERMES, TOOLS)
    read = 0

    class Counting(type(parser._reader)):  # type: ignore[misc]
        def _end(self, text: str, at: int) -> Any:
            nonlocal read
            before = 0 if self._scanner is None else self._scanner[1]._at
            end = super()._end(text, at)
            read += (len(text) if self._scanner is None else self._scanner[1]._at) - before
            return end

    parser._reader.__class__ = Counting
    for start in range(0, len(reply), 30):
        parser.add(reply[start : start + 30])
    assert parser.count == 1 and read < 2 * len(reply)


TEMPLATES = {
    "{% if tools %}<tool_call>{% endif %}": "hermes",
    "{% if tools %}<tool_call><function=x>{% endif %}": "qwen-xml",
    "{% for t in tools %}{% endfor %}<|python_tag|>": "llama",
    '{%- if tools %}{{ \'{"name": function name, "parameters": dictionary}\' }}{% endif %}': "llama",
    "{% if tools is defined %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]": "mistral",
    "{% if tools %}<function=a></function><|python_tag|>{% endif %}": "functionary",
    "{% if tools %}<｜tool▁call▁begin｜>{% endif %}": "deepseek",
    "{% if tools %}<|tool_call|>{% endif %}": "bar",
    "{% if tools %}<|START_ACTION|>{% endif %}": "command",
    "{% if tools %}{{ tools | tojson }}{% endif %}": "generic",
    "{{ messages[0].tools }}{{ 'no tools' }} tools {# tools #}": "hermes",
    "": "hermes",
}


@pytest.mark.parametrize(("template", "style"), TEMPLATES.items())
def test_a_template_tells_its_style(template: str, style: str) -> None:
    assert detect_style(template) is STYLES[style]


def forced(grammar: Any, samples: int = 1) -> list[str]:
    """Texts that a grammar allows, drawn letter by letter."""
    import random

    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    texts = []
    for seed in range(samples):
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar.text))
        assert not matcher.get_error(), matcher.get_error()
        draw, drawn = random.Random(seed), []
        while not matcher.is_stopped() and len(drawn) < 3000:
            mask = matcher.compute_logit_bias()
            allowed = [token for token, bias in enumerate(mask) if bias]
            plain = [t for t in allowed if t < 128 and (chr(t).isalnum() or chr(t) in ' "{}[]:,<>/=_\n;')]
            if matcher.is_accepting() and (not plain or draw.random() < 0.5):
                break
            closing = [t for t in plain if chr(t) in '"}]'] if len(drawn) > 300 else []
            token = draw.choice(closing or plain)
            assert matcher.consume_token(token)
            drawn.append(token)
        assert matcher.is_accepting()
        texts.append(bytes(drawn).decode())
    return texts


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("function", "add")])
def test_a_forced_reply_is_calls_that_obey_their_schemas(style: str, choice: ToolChoice) -> None:
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema_rs")
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    counts = set()
    for text in forced(call_grammar(STYLES[style], TOOLS, choice), samples=12):
        content, calls = parse(STYLES[style], list(text))
        assert content == "" and calls, text
        counts.add(len(calls))
        for name, arguments in calls:
            assert choice.name in (None, name)
            assert jsonschema.is_valid(schemas[name], arguments), text
    assert counts == {1} if choice.name else max(counts) > 1


def test_one_call_at_a_time_can_be_asked_for() -> None:
    pytest.importorskip("llguidance")
    grammar = call_grammar(toolstyle.HERMES, TOOLS, ToolChoice("required"), parallel=False)
    assert {len(parse(toolstyle.HERMES, [text])[1]) for text in forced(grammar, samples=6)} == {1}


def test_where_nothing_may_be_called_there_is_no_grammar_of_calls() -> None:
    assert call_grammar(toolstyle.HERMES, (Tool("look", strict=True),), ToolChoice("none")) is None
    assert call_grammar(toolstyle.HERMES, (), ToolChoice("auto")) is None
