"""Generated tokens stand in for a reply: the next prompt is the last one, the reply as it was written, and the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rekindle.core.request import Message
from rekindle.core.tools import Tool, ToolCall
from rekindle.text.base import WrittenReply
from rekindle.text.chat_template import make_renderer
from rekindle.text.tokenizer import HfTokenizer
from tests.tiny_tokenizer import VOCABULARY, byte_backend

_CALLS = (
    "{% for call in m.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
)
# Thoughts are written behind the last message of the user, as Qwen does; those of former turns are left out.
THINKING = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.asked %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content | trim }}" + _CALLS + "<|end|>\n{% endfor %}"
    "<|start|>assistant{{ '\n' }}"
)
BEGUN = THINKING[: -len("{{ '\n' }}")] + "{{ '\n<think>\n' }}"  # the prompt begins the thought
CHANNELS = (  # as harmony: a message for thoughts, others for text and calls, results named after the last call
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|start|>assistant<|stop|>analysis:{{ m.reasoning_content }}<|stop|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant<|stop|>call {{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|end|>"
    "{% else %}<|start|>assistant<|stop|>final:{{ m.content }}<|end|>{% endif %}{% elif m.role == 'tool' %}"
    "<|start|>{{ messages[loop.index0 - 1].tool_calls[0].function.name }} result:{{ m.content }}<|stop|>"
    "{% else %}<|start|>{{ m.role }}:{{ m.content }}<|stop|>{% endif %}{% endfor %}<|start|>assistant"
)
LLAMA = (  # the content of a message with calls is left out
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}'
    "<|end|>{% endfor %}<|start|>assistant{{ '\n' }}"
)
INSTRUCT = (  # nothing introduces a reply
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ m.content }}" + _CALLS + "<|end|>{% else %}<|start|>{{ m.content }}<|stop|>{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|start|>assistant{{ '\n' }}"
TEMPLATES = {"thinking": THINKING, "begun": BEGUN, "channels": CHANNELS, "llama": LLAMA, "instruct": INSTRUCT,
             "plain": PLAIN}  # fmt: skip
UNTHINKING = [name for name in TEMPLATES if name != "begun"]

WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASKED = Message("user", "Rain?")
CALLED = Message("assistant", "", {"tool_calls": [ToolCall("abc", "weather", '{"city": "Bergen"}').as_openai()]})
RESULT = Message("tool", "wet\n", {"tool_call_id": "abc"})  # as commands print it
SAID = Message("assistant", "Wet.")
ODD = "a reply in other words"  # what the model really wrote: whatever it is, it stands in


def tokenizer_of(template: str, vocabulary_size: int = VOCABULARY) -> HfTokenizer:
    render = make_renderer(template, "<|start|>", "<|end|>")
    return HfTokenizer(
        byte_backend(), render=render, stop_ids=frozenset({256}), vocabulary_size=vocabulary_size, template=template
    )


def thinking_of(message: Message, thinking: str) -> Message:
    return replace(message, extra={**message.extra, "reasoning_content": thinking}) if thinking else message


def written(tokenizer: HfTokenizer, prompt: list[int], thinking: str = "") -> WrittenReply:
    return WrittenReply(tuple(tokenizer.encode(ODD)), thinking, tuple(prompt[-32:]))


@pytest.mark.parametrize(("name", "reply"), [*((name, CALLED) for name in TEMPLATES), *((n, SAID) for n in UNTHINKING)])
def test_the_next_prompt_begins_with_the_last_one_and_its_reply(name: str, reply: Message) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    thinking = "Hm." if name in ("thinking", "begun", "channels") and reply is CALLED else ""
    chat = [ASKED, thinking_of(reply, thinking), RESULT if reply is CALLED else Message("user", "Sure?")]
    prompt = tokenizer.encode_chat(chat[:1], tools=[WEATHER])
    own = written(tokenizer, prompt, thinking)
    replayed = tokenizer.encode_replayed(chat, {1: own}, tools=[WEATHER])
    plain = tokenizer.spell(tokenizer.encode_chat(chat, tools=[WEATHER]))
    assert replayed.replies == 1 and replayed.tokens[: len(prompt) + len(own.tokens)] == [*prompt, *own.tokens]
    rest = tokenizer.spell(replayed.tokens[len(prompt) + len(own.tokens) :])
    assert rest.startswith("<|end|>") and plain.endswith(rest) and "weather" not in rest.split("wet")[-1]


def test_a_reply_whose_thoughts_the_template_leaves_out_is_written_by_the_template() -> None:
    tokenizer = tokenizer_of(THINKING)
    first = tokenizer.encode_chat([ASKED])
    chat = [
        ASKED,
        thinking_of(SAID, "Hm."),
        Message("user", "Sure?"),
        thinking_of(CALLED, "Let me see."),
        RESULT,
    ]
    second = tokenizer.encode_chat(chat[:3])
    thought, own = written(tokenizer, first, "Hm."), written(tokenizer, second, "Let me see.")
    replayed = tokenizer.encode_replayed(chat, {1: thought, 3: own})
    assert replayed.replies == 1 and replayed.tokens[: len(second) + len(own.tokens)] == [*second, *own.tokens]
    assert tokenizer.encode_replayed(chat[:3], {1: thought}).replies == 0
    assert tokenizer.encode_replayed(chat[:3], {1: thought}).tokens == second


def test_nothing_stands_in_where_the_chat_around_it_would_change() -> None:
    counts = "{% for m in messages %}<|start|>{{ m.content | length }}{{ m.content }}<|end|>{% endfor %}<|start|>"
    tokenizer = tokenizer_of(counts)
    chat = [ASKED, SAID, Message("user", "Sure?")]
    own = written(tokenizer, tokenizer.encode_chat(chat[:1]))
    assert tokenizer.encode_replayed(chat, {1: own}).tokens == tokenizer.encode_chat(chat)
    refuses = "{% for m in messages %}{% if m.content | length > 20 %}{{ raise_exception('long') }}{% endif %}<|start|>"
    tokenizer = tokenizer_of(refuses + "{{ m.content }}<|end|>{% endfor %}<|start|>")
    assert tokenizer.encode_replayed(chat, {1: own}).tokens == tokenizer.encode_chat(chat)


def test_control_tokens_that_users_spell_stay_text_around_a_reply() -> None:
    tokenizer = tokenizer_of(THINKING)
    asked, result = Message("user", "What is <|end|>?"), Message("tool", "<|start|>system", {"tool_call_id": "abc"})
    prompt = tokenizer.encode_chat([asked])
    own = written(tokenizer, prompt)
    replayed = tokenizer.encode_replayed([asked, CALLED, result], {1: own})
    assert replayed.replies == 1 and replayed.tokens[: len(prompt)] == prompt
    assert [token for token in replayed.tokens if token >= 256] == [257, 256, 257, 256, 257, 256, 257]


def test_several_replies_in_a_row_stand_in() -> None:
    tokenizer, chat = tokenizer_of(THINKING), [ASKED]
    replies = {}
    for _ in range(3):
        prompt = tokenizer.encode_replayed(chat, replies).tokens
        replies[len(chat)] = written(tokenizer, prompt, "Hm.")
        chat = [*chat, thinking_of(CALLED, "Hm."), RESULT]
        replayed = tokenizer.encode_replayed(chat, replies)
        assert replayed.replies == len(replies) and replayed.tokens[: len(prompt)] == prompt
