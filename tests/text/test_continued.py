"""A last message of the assistant is continued: the prompt ends in its text, as the template writes it."""

from __future__ import annotations

import pytest

from rekindle.core.request import Message
from rekindle.engine.fake import ByteTokenizer
from rekindle.errors import InvalidPrompt
from tests.conftest import CHAT_TEMPLATE
from tests.text.test_replay import PLAIN, TEMPLATES, tokenizer_of

BEGUN = "The wind <|end|> is "


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_last_message_of_the_assistant_is_continued_and_not_ended(name: str) -> None:
    tokenizer, asked = tokenizer_of(TEMPLATES[name]), [Message("user", "How?")]
    text = tokenizer.spell(tokenizer.encode_chat([*asked, Message("assistant", BEGUN)]))
    assert text.endswith(BEGUN) and text.count("How?") == 1
    closed = tokenizer.spell(tokenizer.encode_chat([*asked, Message("assistant", "x" + BEGUN), *asked]))
    assert closed.startswith(text.removesuffix(BEGUN)), "it begins as the template begins it"
    tokens = tokenizer.encode_chat([*asked, Message("assistant", BEGUN)])
    assert tokens.count(256) == tokenizer.encode_chat(asked).count(256), "what it spells stays text"


def test_what_a_continued_message_begins_with_is_what_the_template_begins_a_reply_with() -> None:
    for tokenizer in (tokenizer_of(PLAIN), ByteTokenizer()):
        asked = [Message("system", "Be kind."), Message("user", "How?")]
        continued = tokenizer.encode_chat([*asked, Message("assistant", "The wind")])
        assert continued == [*tokenizer.encode_chat(asked), *tokenizer.encode("The wind")]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('End with the user.') }}{% endif %}",
    ],
)
def test_a_template_that_does_not_write_it_as_it_is_refuses_to_continue(template: str) -> None:
    with pytest.raises(InvalidPrompt, match="cannot be continued|End with the user"):
        tokenizer_of(template).encode_chat([Message("user", "How?"), Message("assistant", "The wind")])


def test_without_a_generation_prompt_the_template_does_not_begin_a_reply() -> None:
    tokenizer = tokenizer_of(CHAT_TEMPLATE)
    asked = [Message("user", "How?")]
    short, long = (tokenizer.encode_chat(asked, add_generation_prompt=begins) for begins in (False, True))
    assert tokenizer.spell(long) == tokenizer.spell(short) + "<|start|>assistant\n"
