"""Where in a conversation two prompts part, and why that is likely.

Agents send the whole conversation with every turn. What parts it from the one before is one of these:

    nonce    a short text with digits (a date, a version, an id) that is another in every request; the rest is the same
    tools    the tools come in another order, or one was added, removed or changed
    thought  the earlier prompt has a thought that this one does not have
    tokens   the same text in other tokens: a reply is generated as tokens that the tokenizer does not choose for it
    reply    a reply came back otherwise than it was generated
    history  an earlier message is another one: edited, compacted, or of another conversation
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rekindle.cache.volatile_text import compare
from rekindle.core.request import Message
from rekindle.text.base import Tokenizer
from rekindle.text.reasoning import detect_thoughts

_NONCE_TOKENS = 48
_FOUND_CHARACTERS = 64  # of a message are looked for: templates trim and escape the rest
_STEP_TOKENS = 512  # spelled at once: a millisecond
_SAME_CHARACTERS = 8  # of two texts whose tokens differ from the first on
_TOOL_NAME = re.compile(r"""["']name["']:""")

CAUSES = {
    "nonce": "a nonce: this text changes from request to request. Move it behind what stays the same.",
    "tools": "the tools, in another order or not the same. `--canonical full` sorts them.",
    "thought": "a stripped thought: the client or the template left out what the model thought.",
    "tokens": "the same text in other tokens than were generated. `--keep-reply-tokens` keeps them.",
    "reply": "a reply that came back otherwise than it was generated. `--keep-reply-tokens` keeps it.",
    "history": "edited history: an earlier message was changed or compacted, or belongs to another conversation.",
}


@dataclass(frozen=True)
class ChatPlace:
    """A place in a prompt: in its tools, or in the message of this index; None: before the first message."""

    message: int | None
    in_tools: bool = False


@dataclass(frozen=True)
class Parting:
    """Two prompts that are the same up to a place: what stands before it, and how each goes on, as tokens."""

    before: Sequence[int]
    ours: Sequence[int]
    known: Sequence[int]


def place_of(parting: Parting, messages: Sequence[Message], tokenizer: Tokenizer) -> ChatPlace:
    """Where in a chat the prompts part, by looking for its messages in the text before."""
    before = _squeezed_text(parting.before, tokenizer)
    found, complete, end = None, True, 0
    for index, message in enumerate(messages):
        for text in _texts(message):
            at = before.find(text[:_FOUND_CHARACTERS], end)
            if at < 0:
                at = _cut_off(before, text, end)
            if at >= 0:
                found, complete = index, before.startswith(text, at)
                end = at + (len(text) if complete else 1)
            elif found == index:
                complete = False
    spoken = [message.role for message in messages[: 0 if found is None else found + 1]]
    if complete and set(spoken) <= {"system", "developer"} and _TOOL_NAME.search(before, end):
        return ChatPlace(None, in_tools=True)
    return ChatPlace(None if found is None else min(found + complete, len(messages) - 1))


def cause_of(parting: Parting, place: ChatPlace, messages: Sequence[Message], tokenizer: Tokenizer) -> str | None:
    """The likely cause, a key of `CAUSES`; None if the prompt only goes on differently at its end."""
    ours, known = tokenizer.spell(parting.ours), tokenizer.spell(parting.known)
    same = min(len(ours), len(known))
    if same >= _SAME_CHARACTERS and ours[:same] == known[:same]:
        return "tokens"
    change = compare(list(parting.ours), list(parting.known))
    if change is not None and max(change.stop, change.other_stop) <= _NONCE_TOKENS:
        changed = tokenizer.spell([*parting.ours[: change.stop], *parting.known[: change.other_stop]])
        if any(char.isdigit() for char in changed):
            return "nonce"
    if place.in_tools:
        return "tools"
    if _has_thought(known, tokenizer) and not _has_thought(ours, tokenizer):
        return "thought"
    if place.message is None or place.message >= len(messages) - 1:
        return None
    return "reply" if messages[place.message].role == "assistant" else "history"


def _texts(message: Message) -> Iterator[str]:
    """What a template surely writes of a message, without white space."""
    if content := "".join(message.content.split()):
        yield content
    for call in message.extra.get("tool_calls") or ():
        name = call.get("function", {}).get("name") if isinstance(call, dict) else None
        if isinstance(name, str) and name:
            yield name


def _squeezed_text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of tokens without white space, in steps: requests are answered meanwhile."""
    texts, start = [], 0
    while start < len(tokens):
        stop = start + _STEP_TOKENS
        text = tokenizer.spell(tokens[start:stop])
        while text.endswith("\ufffd") and stop < start + _STEP_TOKENS + 4:  # half a character
            stop += 1
            text = tokenizer.spell(tokens[start:stop])
        texts.append("".join(text.split()))
        start = stop
    return "".join(texts)


def _cut_off(before: str, text: str, cursor: int) -> int:
    """Where a text begins of which only a part is there; -1 if it does not."""
    for length in range(min(len(text), _FOUND_CHARACTERS, len(before) - cursor) - 1, 0, -1):
        if before.endswith(text[:length]):
            return len(before) - length
    return -1


def _has_thought(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a thought begins or ends in the rest of a turn."""
    style = detect_thoughts(tokenizer.template)
    stops = [at for token in tokenizer.stop_ids if (at := text.find(tokenizer.spell([token]))) >= 0]
    turn = text[: min(stops, default=len(text))]
    return style is not None and any(mark in turn for mark in (*style.opens, *style.closes))
