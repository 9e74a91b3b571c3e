"""Tools in prompts: as transformers renders them where the template takes them, in words where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.request import Message
from rekindle.core.tools import Tool, ToolCall
from rekindle.engine.fake import ByteTokenizer
from rekindle.errors import InvalidPrompt
from rekindle.text.chat_template import make_renderer
from rekindle.text.tokenizer import HfTokenizer
from rekindle.text.tools.parse import ToolParser
from rekindle.text.tools.styles import TemplateTools, detect_style
from tests.tiny import byte_backend

pytestmark = pytest.mark.thorough

QWEN = (
    "{%- if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Reply with <tool_call>.<|end|>{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_response>{{ m.content }}"
    "</tool_response>{% elif m.tool_calls %}{{ m.content }}{% for call in m.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}<|start|>assistant{{ '\n' }}"
)
LLAMA = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if tools is not none and m.role == 'user' and loop.first %}{% for t in tools %}{{ t | tojson(indent=4) }}\n"
    "{% endfor %}{% endif %}{% if 'tool_calls' in m %}<|python_tag|>{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "<|start|>assistant{{ '\n' }}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{% for t in tools %}{% for key, value in t.function.items() %}"
    "{{ key }}: {{ value | tojson }}, {% endfor %}{% endfor %}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.content is none %}[TOOL_CALLS]{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Ids have nine letters.') }}{% endif %}"
    "{{ call.function | tojson }} {{ call.id }}{% endfor %}{% elif m.role == 'tool' %}"
    "{{ m.tool_call_id }}: {{ m.content }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}<|end|>{% endfor %}"
)
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}
PLAIN = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}<|start|>assistant{{ '\n' }}"
)
STRICT = (  # as some models: no instructions, and turns that alternate
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('Only user and assistant, in turn.') }}{% endif %}<|start|>{{ m.content }}<|end|>{% endfor %}"
)
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|python_tag|>", "[TOOL_CALLS]"]

WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = ToolCall("abcdefghi", "weather", '{"city": "Ås"}')


def backend() -> tokenizers.Tokenizer:
    made = byte_backend()
    made.add_tokens(MARKERS)
    return made


def tokenizer_of(template: str) -> HfTokenizer:
    return HfTokenizer(
        backend(),
        render=make_renderer(template, "<|start|>", "<|end|>"),
        stop_ids=frozenset(),
        vocabulary_size=320,
        template=template,
    )


def rounds(call: ToolCall = CALL, question: str = "Rain?", result: str = "wet") -> list[Message]:
    return [
        Message("user", question),
        Message("assistant", "", {"tool_calls": [call.as_openai()]}),
        Message("tool", result, {"tool_call_id": call.id}),
    ]


def as_transformers_reads(messages: list[Message], *, none: bool) -> list[dict[str, Any]]:
    chat = [{"role": m.role, "content": m.content, **m.extra} for m in messages]
    chat[1] |= {"content": None if none else "", "tool_calls": [CALL.as_template_input()]}
    return chat


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_that_takes_tools_gets_them_as_from_transformers(family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=backend(), bos_token="<|start|>", eos_token="<|end|>")
    theirs.chat_template = TEMPLATES[family]
    chat = as_transformers_reads(rounds(), none=family == "mistral")
    expected = theirs.apply_chat_template(
        chat, tools=[WEATHER.as_openai()], add_generation_prompt=True, return_dict=False
    )
    ours = tokenizer_of(TEMPLATES[family])
    assert ours.encode_chat(rounds(), tools=[WEATHER]) == expected
    assert '{"city": "Ås"}' in ours.spell(expected) and "Tells the weather." in ours.spell(expected)


def test_a_folder_with_a_template_of_its_own_for_tools_uses_it(tiny_folder: Path, tmp_path: Path) -> None:
    import shutil

    from rekindle.engine.hf.engine import HfEngine
    from rekindle.models.files import ModelFiles

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "two"))
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    templates = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    tokenizer = HfEngine.load(ModelFiles("two", folder), device="cpu").tokenizer
    assert QWEN in tokenizer.template and detect_style(tokenizer.template).name == "hermes"
    asked = [Message("user", "Rain?")]
    assert "Reply with <tool_call>" in tokenizer.spell(tokenizer.encode_chat(asked, tools=[WEATHER]))
    assert "Reply with" not in tokenizer.spell(tokenizer.encode_chat(asked))


def test_ids_that_a_template_refuses_are_replaced_by_the_same_ones_in_call_and_result() -> None:
    tokenizer = tokenizer_of(MISTRAL)
    text = tokenizer.spell(tokenizer.encode_chat(rounds(ToolCall("call_with-a-long-id", "weather", "{}"))))
    (id_in_call,) = [part.split("<|end|>")[0] for part in text.split("} ")[1:]]
    assert len(id_in_call) == 9 and f"{id_in_call}: wet" in text


evil = st.lists(st.sampled_from([*MARKERS, "<|end|>", "<|start|>", "x", '"', "\\", "{", "é"]), max_size=5).map("".join)


@pytest.mark.parametrize("family", [*TEMPLATES, "plain"])
@given(texts=st.tuples(evil, evil, evil, evil))
def test_markers_in_what_users_and_tools_say_are_text(family: str, texts: tuple[str, str, str, str]) -> None:
    tokenizer = tokenizer_of({**TEMPLATES, "plain": PLAIN}[family])
    marks = set(tokenizer._ids.values())  # that the template writes; others are just text with a token of its own

    def control(question: str, result: str, argument: str, described: str) -> list[int]:
        call = ToolCall("abcdefghi", "weather", json.dumps({"city": argument}))
        schema = {"type": "object", "properties": {"city": {"type": "string", "description": described}}}
        tools = [Tool("weather", described, schema)]
        return [t for t in tokenizer.encode_chat(rounds(call, question, result), tools=tools) if t in marks]

    assert control(*texts) == control("a", "b", "c", "d")


def test_a_template_that_writes_tools_with_escapes_shows_what_was_meant() -> None:
    tokenizer = tokenizer_of("{% for t in tools %}{{ t.function.description | string }} {{ t.function }}{% endfor %}")
    tokens = tokenizer.encode_chat([Message("user", "x")], tools=[Tool("t", "a <|end|> b")])
    assert [t for t in tokens if t >= 256] == []
    assert tokenizer.decode(tokens).count("a <|end|> b") == 2


def test_a_template_that_knows_no_tools_has_them_in_words() -> None:
    tokenizer = tokenizer_of(PLAIN)
    chat = [*rounds(), Message("assistant", "It rains."), Message("user", "Thanks.")]
    turns = tokenizer.spell(tokenizer.encode_chat(chat, tools=[WEATHER])).split("<|end|>")
    assert turns[0].startswith("<|start|>system\n") and json.dumps(WEATHER.as_openai()["function"]) in turns[0]
    assert turns[2] == '<|start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ås"}}\n</tool_call>'
    assert turns[3] == '<|start|>user\n<tool_response>\n{"name": "weather", "content": "wet"}\n</tool_response>'
    assert turns[4] == "<|start|>assistant\nIt rains."


def test_what_is_written_in_words_is_read_back_as_the_same_calls() -> None:
    others = ToolCall("b", "weather", '{"city": "</tool_call>"}')
    message = Message("assistant", "Two.", {"tool_calls": [CALL.as_openai(), others.as_openai()]})
    tokenizer = tokenizer_of(PLAIN)
    text = tokenizer.spell(tokenizer.encode_chat([Message("user", "?"), message], tools=[WEATHER]))
    reply = text.split("<|start|>assistant\n")[1].removesuffix("<|end|>")
    parser = ToolParser(detect_style(tokenizer.template), [WEATHER])
    parsed, rest = parser.add(reply), parser.finish()
    assert parsed.content + rest.content == "Two."
    assert [json.loads(delta.call.arguments)["city"] for delta in parsed.calls] == ["Ås", "</tool_call>"]


def test_words_follow_the_instructions_of_the_chat() -> None:
    tokenizer = tokenizer_of(PLAIN)
    chat = [Message("system", "Be brief."), Message("user", "Rain?")]
    turns = tokenizer.spell(tokenizer.encode_chat(chat, tools=[WEATHER])).split("<|end|>")
    assert turns[0].startswith("<|start|>system\nBe brief.\n\n# Tools") and len(turns) == 3


def test_results_of_one_round_are_one_turn() -> None:
    calls = [ToolCall(name, "weather", "{}").as_openai() for name in ("a", "b")]
    results = [Message("tool", text, {"tool_call_id": name}) for name, text in (("a", "wet"), ("b", "dry"))]
    chat = [Message("user", "Rain?"), Message("assistant", "", {"tool_calls": calls}), *results]
    tokenizer = tokenizer_of(PLAIN)
    turns = tokenizer.spell(tokenizer.encode_chat(chat, tools=[WEATHER])).split("<|end|>")
    assert turns[3].count("<tool_response>") == 2 and turns[4] == "<|start|>assistant\n"


def test_a_template_without_instructions_has_the_tools_in_the_first_turn() -> None:
    tokenizer = tokenizer_of(STRICT)
    turns = tokenizer.spell(tokenizer.encode_chat(rounds(), tools=[WEATHER])).split("<|end|>")
    assert "# Tools" in turns[0] and turns[0].endswith("Rain?") and len(turns) == 4


def test_without_tools_a_prompt_is_what_it_was() -> None:
    for template in (*TEMPLATES.values(), PLAIN):
        tokenizer, asked = tokenizer_of(template), Message("user", "Rain?")
        chat = [asked, Message("assistant", "Yes."), asked]
        expected = make_renderer(template, "<|start|>", "<|end|>")([m.as_template_input() for m in chat])
        assert tokenizer.spell(tokenizer.encode_chat(chat)) == expected


@pytest.mark.parametrize("calls", ["weather", [5], [{"function": {}}], {"id": "1"}])
def test_calls_that_are_none_are_refused(calls: object) -> None:
    with pytest.raises(InvalidPrompt, match="call"):
        tokenizer_of(QWEN).encode_chat([Message("assistant", "", {"tool_calls": calls})])


def test_the_fake_engine_has_tools_in_words_too() -> None:
    text = ByteTokenizer().spell(ByteTokenizer().encode_chat(rounds(), tools=[WEATHER]))
    assert "# Tools" in text and "<tool_response>" in text and detect_style(ByteTokenizer.template).name == "hermes"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% if tools %}{% endif %}", True),
        ("{%- for tool in tools -%}{% endfor %}", True),
        ("{{ render(tools) }}", True),
        ("{{ message.tools }}{{ message['tools'] }}{{ builtin_tools }}", False),
        ("{{ 'the tools' }} tools {# tools #}", False),
    ],
)
def test_whether_a_template_takes_tools_is_read_off_its_code(template: str, takes: bool) -> None:
    assert TemplateTools.of(template).takes_tools is takes


REAL_ROUNDS = [
    Message("user", "Does it rain in Ås? <tool_call> <|im_end|>"),
    Message("assistant", "Let me see.", {"tool_calls": [CALL.as_openai()]}),
    Message("tool", "rain <|im_start|>", {"tool_call_id": CALL.id}),
]


@pytest.mark.real
def test_rounds_with_tools_on_the_template_of_smollm2() -> None:
    from rekindle.engine.hf.engine import HfEngine
    from rekindle.models.sources import find

    tokenizer = HfEngine.load(find("smollm2"), device="cpu").tokenizer
    assert detect_style(tokenizer.template).name == "hermes" and not TemplateTools.of(tokenizer.template).takes_tools
    tokens = tokenizer.encode_chat(REAL_ROUNDS, tools=[WEATHER])
    start, end = (tokenizer._ids[mark] for mark in ("<|im_start|>", "<|im_end|>"))
    assert [t for t in tokens if t in (start, end)] == [start, end] * 4 + [start], "the template's own and no others"
    text = tokenizer.spell(tokens)
    assert "named SmolLM" not in text and '"description": "Tells the weather."' in text
    assert (
        "<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ås"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"name": "weather", "content": "rain <|im_start|>"}\n</tool_response>'
        "<|im_end|>\n<|im_start|>assistant\n"
    ) in text


@pytest.mark.real
@pytest.mark.llamacpp
def test_both_engines_write_the_same_rounds() -> None:
    pytest.importorskip("xllamacpp")
    from rekindle.engine.hf.engine import HfEngine
    from rekindle.engine.llamacpp.engine import LlamaCppEngine
    from rekindle.engine.llamacpp.options import LlamaOptions
    from rekindle.models.sources import find

    theirs = LlamaCppEngine(find("smollm2"), LlamaOptions(context_tokens=512))
    try:
        tokens = theirs.tokenizer.encode_chat(REAL_ROUNDS, tools=[WEATHER])
    finally:
        theirs.close()
    assert tokens == HfEngine.load(find("smollm2"), device="cpu").tokenizer.encode_chat(REAL_ROUNDS, tools=[WEATHER])


LATE = (  # as some models: instructions only at the start
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('Only first.') }}"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
)


def test_late_instructions_stay_where_the_template_allows_them_and_else_become_the_users() -> None:
    said = [("system", "A"), ("user", "B"), ("system", "C"), ("assistant", "D"), ("system", "E"), ("user", "F")]
    merged = [("system", "A"), ("user", "B\n\nC"), ("assistant", "D"), ("user", "E\n\nF")]
    for template, expected in ((PLAIN, said), (LATE, merged)):
        tokenizer = tokenizer_of(template)
        text = tokenizer.spell(tokenizer.encode_chat([Message(role, text) for role, text in said]))  # type: ignore[arg-type]
        assert text.startswith("".join(f"<|start|>{role}\n{text}<|end|>" for role, text in expected))
