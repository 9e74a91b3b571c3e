"""Where in a conversation two prompts part, and why that is likely.

Agents send the whole conversation with every turn. What parts it from the one before is one of these:

    nonce    a short text with digits (a date, a version, an id) that is another in every request; the rest is the same
    tools    the tools come in another order, or one was added, removed or changed
    thought  the earlier prompt has a thought that this one does not have
    tokens   the same text in other tokens: a reply is generated as tokens that the tokenizer does not choose for it
    reply    a reply came back otherwise than it was generated
    history  an earlier message is another one: edited, compacted, or of another conversation

`find_volatile` looks for text that changes from request to request, early in the prompt: a date, a counter, a name.

    earlier    You are an assistant. Today is  Monday  . Here are the rules: ... 900 tokens ...
    now        You are an assistant. Today is  Tuesday . Here are the rules: ... 900 tokens ...
                                      start ^  stop   ^  shared

Everything behind it has to be computed again, though it is the same text. Moving it to the end would save that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rekindle.core.keys import common_tokens, token_bytes
from rekindle.core.request import Message
from rekindle.text.base import Tokenizer
from rekindle.text.reasoning import detect_thoughts

MIN_SHARED = 64  # tokens behind the change: less is not worth a word
_LONGEST_CHANGE = 256
_ANCHOR = 8  # number of equal tokens in a row where the texts meet again
_MIN_REQUESTS = 2


@dataclass(frozen=True)
class PromptDifference:
    """What differs between two prompts: `[start, stop)` of one, `[start, other_stop)` of the other."""

    start: int
    stop: int
    other_stop: int
    shared: int  # equal tokens behind it


@dataclass(frozen=True)
class Volatile:
    """Text of a prompt that was another in earlier requests, though what follows was the same."""

    start: int
    stop: int
    shared_tokens: int  # behind it, on average
    requests: int  # number of earlier requests that differ there
    others: tuple[tuple[int, ...], ...]  # what stood there, newest first


def find_volatile(tokens: Sequence[int], earlier: Sequence[Sequence[int]]) -> Volatile | None:
    """The text that changes, if the same place changed in at least two earlier prompts (newest first)."""
    changes = [(change, prompt) for prompt in earlier if (change := compare(tokens, prompt)) is not None]
    if not changes:
        return None
    start, count = Counter(change.start for change, _ in changes).most_common(1)[0]
    if count < _MIN_REQUESTS:
        return None
    same = [(change, prompt) for change, prompt in changes if change.start == start]
    others = tuple(dict.fromkeys(tuple(prompt[start : change.other_stop]) for change, prompt in same))
    shared = sum(change.shared for change, _ in same) // len(same)
    return Volatile(start, max(change.stop for change, _ in same), shared, count, others)


def compare(a: Sequence[int], b: Sequence[int]) -> PromptDifference | None:
    """Where `a` says something else than `b`, if they go on alike behind it.

    None if they do not differ, differ for good, or `a` only lacks something.
    """
    start = _common(a, b)
    if start >= min(len(a), len(b)):
        return None
    anchors: dict[tuple[int, ...], int] = {}
    for own in range(start, min(start + _LONGEST_CHANGE, len(a) - _ANCHOR + 1)):
        anchors.setdefault(tuple(a[own : own + _ANCHOR]), own)
    best: PromptDifference | None = None
    for other in range(start, min(start + _LONGEST_CHANGE, len(b) - _ANCHOR + 1)):
        place = anchors.get(tuple(b[other : other + _ANCHOR]))
        if place is not None and (best is None or place + other < best.stop + best.other_stop):
            best = PromptDifference(start, place, other, _common(a[place:], b[other:]))
    if best is None or best.stop == start or best.shared < MIN_SHARED:
        return None
    return best


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return common_tokens(token_bytes(a), token_bytes(b))


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
