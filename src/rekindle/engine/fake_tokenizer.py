"""The tokenizer of the fake engine: bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rekindle.core.request import Message
from rekindle.core.tools import Tool
from rekindle.engine.base import Quoting, Written
from rekindle.engine.calls import ToolHabits, in_words
from rekindle.errors import InvalidPrompt

END, START = 256, 257
VOCABULARY = 258


class ByteTokenizer:
    """One token a byte, and two control tokens that no text can spell."""

    stop_ids = frozenset({END})
    vocabulary_size = VOCABULARY
    template = ""

    def encode(self, text: str) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(text.encode("utf-8"))

    def encode_chat(
        self,
        messages: Sequence[Message],
        written: Written | None = None,  # noqa: ARG002
        *,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Each message between a start and an end, then the start of the reply. A text has one spelling only.

        Tools are put into words.
        """
        chat = [ToolHabits.of(self.template).prepare(m.as_template_input()) for m in messages]
        if tools or any(m.get("tool_calls") for m in chat):
            chat = in_words(chat, [tool.as_template_input() for tool in tools])
        turns = [[START, *self.encode(f"{m['role']}\n{m['content']}"), END] for m in chat]
        return [token for turn in turns for token in turn] + [START, *self.encode("assistant\n")]

    def encode_quoting(
        self, messages: Sequence[Message], quotes: Sequence[str], *, tools: Sequence[Tool] = ()
    ) -> Quoting:
        """The same, with quotes in front of what the user first says."""
        place = next((at for at, message in enumerate(messages) if message.role == "user"), None)
        if place is None:
            raise InvalidPrompt("There is no user message that passages could be quoted for. Add one.")
        whole = self.encode_chat(messages, tools=tools)
        rest = self.encode_chat(messages[place:], tools=())
        at = len(whole) - len(rest) + 1 + len(self.encode("user\n"))
        return Quoting(whole[:at], [self.encode(text) for text in quotes], whole[at:])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes; a cut-off character becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def spell(self, tokens: Sequence[int]) -> str:
        """The same, with the two control tokens spelled out."""
        names = {START: "<start>", END: "<end>"}
        runs = groupby(tokens, key=lambda token: token in names)
        return "".join("".join(names[t] for t in run) if control else self.decode(list(run)) for control, run in runs)

    def pieces(self) -> list[bytes]:
        """The bytes themselves; none for the two control tokens."""
        return [bytes([token]) if token < 256 else b"" for token in range(VOCABULARY)]
