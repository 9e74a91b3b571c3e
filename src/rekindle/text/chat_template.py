"""Chats to tokens, for any tokenizer library: the model's own chat template, in which user text never becomes a control
token.

Control tokens are the tokenizer's special tokens and the markers that the chat template writes (some models do not
declare theirs special). Nearly always no user text spells one, and the rendered chat is tokenized as it is. Otherwise
the spellings are replaced by placeholders while the template is rendered, and then tokenized as plain text.

Assistant messages may contain the model's own markers (a thought, a tool call): in them only special tokens are text.

Templates are rendered as transformers and llama.cpp do, in a process that can be stopped (`template_worker`).
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from rekindle.core.request import Message, Think
from rekindle.core.tools import ToolCall
from rekindle.errors import InvalidPrompt, RekindleError
from rekindle.text.base import (
    QuotedChat,
    ReplayedChat,
    TemplateOptions,
    TokenLength,
    Written,
    WrittenReply,
    check_cancelled,
    check_length,
    is_cancelled,
)
from rekindle.text.reasoning import detect_thoughts, think_variables, thought_for_template
from rekindle.text.sandbox import LimitExceeded, SandboxProcess, WorkRefused
from rekindle.text.tools.styles import TemplateTools, late_instructions_as_user, merge_system_message, tools_as_text


@dataclass(frozen=True)
class TextAround:
    """The text of a chat around the replies that were cut out of it: one more than `replies`, their indices."""

    around: tuple[str, ...]
    replies: tuple[int, ...]

    def is_of(self, text: str) -> bool:
        """Whether `text` is this text with something in place of each reply."""
        first, *inner, last = self.around
        if not text.startswith(first) or not text.endswith(last):
            return False
        place, end = len(first), len(text) - len(last)
        for part in inner:
            place = text.find(part, place, end)
            if place < 0:
                return False
            place += len(part)
        return place <= end


class ReplyMarks:
    """Where the `written` replies stand in a rendered chat, so that the tokens which the model generated replace them.

    The chat is rendered a second time with marks: in place of the text of a reply (or the name of its first call), of
    its thoughts, and behind the message that follows. `nonce` is in no text: letters and digits, which stay in any
    JSON.

        <|start|>assistant  <think>THOUGHT</think>MARK  <|end|>  <|start|>user  And now?FOLLOWER<|end|>
                          ^ behind the header         ^ before the first token that ends a reply

    What lies between the two places is the reply, however the template writes thoughts and calls.
    """

    def __init__(self, nonce: str, written: Written) -> None:
        self._nonce, self._written = nonce, written

    def mark(self, messages: Sequence[Message]) -> list[Message]:
        """The chat with marks."""
        marked = list(messages)
        for at, reply in self._written.items():
            extra = dict(messages[at].extra)
            if reply.thinking:
                extra["reasoning_content"] = self._mark("thought", at)
            if calls := extra.get("tool_calls"):
                first = ToolCall.parse(calls[0])
                extra["tool_calls"] = [replace(first, name=self._mark("reply", at)).as_openai(), *calls[1:]]
            content = messages[at].content if calls else self._mark("reply", at)
            marked[at] = Message("assistant", content, extra)
        for at in self._written:
            if at + 1 not in self._written:
                follower = messages[at + 1]
                said = follower.content.rstrip()  # templates may trim the rest
                content = said + self._mark("follower", at) + follower.content[len(said) :]
                marked[at + 1] = replace(follower, content=content)
        return marked

    def names(self, messages: Sequence[Message]) -> dict[str, str]:
        """The names of calls that marks stand for."""
        calls = {at: messages[at].extra.get("tool_calls") for at in self._written}
        return {self._mark("reply", at): ToolCall.parse(made[0]).name for at, made in calls.items() if made}

    def cut_out(
        self, text: str, headers: Mapping[int, str], stops: Sequence[str], names: Mapping[str, str]
    ) -> TextAround:
        """The text around the replies that are found, without marks.

        headers   what stands before each reply; empty if it is unknown: then it begins with its mark
        stops     spellings of the tokens that end a reply
        names     what marks stand for in other places
        """
        cuts = {at: cut for at in sorted(self._written) if (cut := self._cut(text, at, headers[at], stops)) is not None}
        edges = [(0, 0), *cuts.values(), (len(text), len(text))]
        around = [text[a:b] for (_, a), (b, _) in pairwise(edges)]
        meant = {**names, **{self._mark("follower", at): "" for at in self._written}}
        for mark, name in meant.items():
            around = [part.replace(mark, name) for part in around]
        return TextAround(tuple(around), tuple(cuts))

    def _cut(self, text: str, at: int, header: str, stops: Sequence[str]) -> tuple[int, int] | None:
        """Where a reply begins and ends; None if the template does not write it, or not its thoughts."""
        mark = first = text.find(self._mark("reply", at))
        if self._written[at].thinking:
            first = text.find(self._mark("thought", at), 0, max(mark, 0))
        follower = "reply" if at + 1 in self._written else "follower"
        bound = text.find(self._mark(follower, at + (follower == "reply")), max(mark, 0))
        begins = text.rfind(header, 0, max(first, 0))
        ends = [place for stop in stops if (place := text.find(stop, mark, bound)) >= 0]
        if min(mark, first, bound, begins) < 0 or not ends:
            return None
        return begins + len(header), min(ends)

    def _mark(self, kind: str, at: int) -> str:
        return f"{self._nonce}{kind}{at}x"


if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_QUOTES = 2048  # quotes whose tokens are cached
_MAX_QUOTE_CHARACTERS = 8192  # of a cached quote


class Render(Protocol):
    """Renders the model's template."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        think: Think | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text, up to where the reply begins. Raises `InvalidPrompt` if it refuses the messages.

        `tools` are passed only to a template that takes them, and only if there are any; `think` only if it was asked,
        and `add_generation_prompt` only if it is false.
        """


class ChatTokenizer(ABC):
    """What the tokenizers of all libraries share. See `Tokenizer` for the contract."""

    needs_model = False
    stop_ids: frozenset[int]

    def __init__(
        self, *, render: Render | None, special: Iterable[str], control: Iterable[str], template: str = ""
    ) -> None:
        """`special` are the spellings of special tokens; `control` are those and the template's markers.

        `template` is the source that `render` renders.
        """
        self.template = template
        self._template_tools = TemplateTools.of(template)
        self._render = render
        self._special, self._control = match_any(special), match_any(control)
        self._nonce = secrets.token_hex(8)
        self._begins_thought: dict[Think | None, bool] = {}
        self._quotes: dict[str, Sequence[int]] = {}  # tokens of recent quotes: the same passages recur

    @abstractmethod
    def _plain(self, text: str, *, begins: bool = True) -> list[int]:
        """Tokens of a rendered chat or a part of it; `begins`: it is the first part."""

    @abstractmethod
    def _mixed(self, text: str, reveal: Callable[[str], str], *, begins: bool = True) -> list[int]:
        """Tokens of a rendered chat: control tokens in `text` count, those that `reveal` puts back are plain text."""

    @abstractmethod
    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens with control tokens spelled out."""

    @property
    @abstractmethod
    def token_length(self) -> TokenLength | None:
        """How much text one token may cover; None if unknown."""

    def begins_thought(self, think: Think | None = None) -> bool:
        if think not in self._begins_thought:
            self._begins_thought[think] = self._ends_in_thought(think)
        return self._begins_thought[think]

    def _ends_in_thought(self, think: Think | None) -> bool:
        style = detect_thoughts(self.template)
        if style is None or self._render is None:
            return False
        try:
            chat = [{"role": "user", "content": "x"}]
            return self._render(chat, **_if_asked(think)).rstrip().endswith(style.opens)
        except InvalidPrompt:
            return False

    def token_of(self, spelling: str) -> int | None:
        tokens = self._plain(spelling, begins=False)
        return tokens[0] if len(tokens) == 1 else None

    def min_token_count(self, text: str) -> int:
        return 0 if self.token_length is None else self.token_length.min_token_count(text)

    def encode_chat(self, messages: Sequence[Message], **how: Unpack[TemplateOptions]) -> list[int]:
        chat = self._rendered(messages, how)
        self._check_length(chat, how.get("token_limit"))
        return self._tokens(chat.text, chat.hidden)

    def _check_length(self, chat: _Chat, token_limit: int | None) -> None:
        """Raise `ContextOverflow` for a chat that must have more than `token_limit`, by its control tokens or text."""
        if token_limit is not None and len(chat.text) > token_limit:
            check_length(chat.text, token_limit, lambda text: sum(1 for _ in self._special.finditer(text)))
        check_length(chat.revealed, token_limit, self.min_token_count)

    def encode_replayed(
        self, messages: Sequence[Message], written: Written, **how: Unpack[TemplateOptions]
    ) -> ReplayedChat:
        chat = self._rendered(messages, how)
        self._check_length(chat, how.get("token_limit"))
        found = self._without_replies(chat, messages, written, how)
        if found is None:
            return ReplayedChat(self._tokens(chat.text, chat.hidden))
        tokens: list[int] = []
        for place, text in enumerate(found.around):
            tokens += self._tokens(text, chat.hidden, begins=not place)
            tokens += written[found.replies[place]].tokens if place < len(found.replies) else ()
        return ReplayedChat(tokens, len(found.replies))

    def _without_replies(
        self, chat: _Chat, messages: Sequence[Message], written: Written, how: TemplateOptions
    ) -> TextAround | None:
        """The text of a chat around the replies that can be cut out; None if there are none."""
        stops = [self.spell([token]) for token in self.stop_ids]
        headers = {at: self._header(reply) for at, reply in written.items() if at + 1 < len(messages)}
        chosen = {
            at: header
            for at, header in headers.items()
            if header or not (written[at].thinking or messages[at].extra.get("tool_calls"))
        }
        for _ in range(2):  # again without those that the template does not write as they were generated
            if not chosen:
                return None
            marks = ReplyMarks(self._nonce, {at: written[at] for at in chosen})
            try:
                marked = self._rendered(marks.mark(messages), how, chat.hidden)
            except InvalidPrompt:
                return None
            names = {mark: chat.hidden.hide(name, self._control) for mark, name in marks.names(messages).items()}
            found = marks.cut_out(marked.text, chosen, stops, names)
            if len(found.replies) == len(chosen):
                return found if found.is_of(chat.text) else None
            chosen = {at: chosen[at] for at in found.replies}
        return None

    def _header(self, reply: WrittenReply) -> str:
        """What the template writes right before a reply, from its last special token on; empty if it has none."""
        text = self.spell(reply.before)
        return text[max((found.start() for found in self._special.finditer(text)), default=len(text)) :]

    def _tokens(self, text: str, hidden: _Hidden, *, begins: bool = True) -> list[int]:
        if hidden.spellings:
            return self._mixed(text, hidden.reveal, begins=begins)
        return self._plain(text, begins=begins)

    def encode_quoting(
        self, messages: Sequence[Message], quotes: Sequence[str], **how: Unpack[TemplateOptions]
    ) -> QuotedChat:
        place = next((at for at, message in enumerate(messages) if message.role == "user"), None)
        if place is None:
            raise InvalidPrompt("There is no user message that passages could be quoted for. Add one.")
        mark = f"\ue004{self._nonce}:quotes\ue005"
        marked = [*messages]
        marked[place] = replace(messages[place], content=mark + messages[place].content)
        chat, token_limit = self._rendered(marked, how), how.get("token_limit")
        check_length(chat.revealed.replace(mark, ""), token_limit, self.min_token_count)
        parts = chat.text.split(mark)
        if len(parts) != 2:
            raise InvalidPrompt("This model's chat template does not write messages as they are: it cannot quote.")
        before, after = (self._tokens(part, chat.hidden, begins=not at) for at, part in enumerate(parts))
        return QuotedChat(before, [self._quote(self._cut(text, token_limit)) for text in quotes], after)

    def _cut(self, text: str, token_limit: int | None) -> str:
        """The longest prefix that may have `token_limit` tokens; it rarely has fewer."""
        if token_limit is None or len(text) <= token_limit:
            return text
        return text[: len(text) * token_limit // max(token_limit, self.min_token_count(text)) + 1]

    def _quote(self, text: str) -> Sequence[int]:
        """Tokens of a text that is data, whatever it spells."""
        known = self._quotes.get(text)
        if known is None:
            mark = f"\ue004{self._nonce}:quote\ue005"
            spells = self._control.search(text)
            known = tuple(
                self._mixed(mark, lambda part: part.replace(mark, text), begins=False)
                if spells
                else self._plain(text, begins=False)
            )
            if len(self._quotes) >= _MAX_QUOTES:
                self._quotes.clear()
            if len(text) <= _MAX_QUOTE_CHARACTERS:
                self._quotes[text] = known
        return known

    def _rendered(self, messages: Sequence[Message], how: TemplateOptions, hidden: _Hidden | None = None) -> _Chat:
        if self._render is None:
            raise InvalidPrompt(
                "This model has no chat template: it can only continue a text. Use `rekindle run --raw`, "
                "/v1/completions of a server, or a plain prompt in Python."
            )
        hidden = hidden or _Hidden()
        shown = [self._shown(message, hidden) for message in messages]
        offered = [hidden.hide(tool.as_template_input(), self._control) for tool in how.get("tools", ())]
        options = _if_asked(how.get("think"))
        if self._template_tools.takes_tools and offered:
            options["tools"] = offered
        elif not self._template_tools.takes_tools and (offered or any(m.get("tool_calls") for m in shown)):
            shown = self._accepted(tools_as_text(shown, offered))
        mark = f"\ue004{self._nonce}:end\ue005" if messages[-1].is_continued else ""
        if mark:
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + mark}
        if mark or not how.get("add_generation_prompt", True):
            options["add_generation_prompt"] = False
        render: Callable[..., str] = partial(self._render, **options)
        if any(message["role"] == "system" for message in shown[1:]):
            try:
                return _Chat(_until(mark, render(shown)), hidden)
            except InvalidPrompt:
                shown = late_instructions_as_user(shown)
        return _Chat(_until(mark, render(shown)), hidden)

    def _shown(self, message: Message, hidden: _Hidden) -> dict[str, Any]:
        """A message as the template gets it. Arguments of a call are data, although the model wrote them."""
        ready = self._template_tools.prepare(thought_for_template(message.as_template_input(), self.template))
        calls = hidden.hide({key: ready.pop(key) for key in ("tool_calls",) if key in ready}, self._control)
        return {**hidden.hide(ready, self._forbidden(message)), **calls}

    def _accepted(self, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The chat, with its system message merged into the first user message if the template refuses one."""
        assert self._render is not None
        try:
            self._render(shown)
        except InvalidPrompt:
            return merge_system_message(shown)
        return shown

    def _forbidden(self, message: Message) -> re.Pattern[str]:
        """The spellings that must stay text in a message."""
        return self._special if message.role == "assistant" else self._control


def _until(mark: str, text: str) -> str:
    """A rendered chat up to the mark at the end of the message that is continued; "": there is none."""
    if not mark:
        return text
    before, *after = text.split(mark)
    if len(after) != 1:
        raise InvalidPrompt(
            "The last message is the assistant's, and this model's chat template does not write it as it is, so it "
            "cannot be continued. End with a message of the user."
        )
    return before


def _if_asked(think: Think | None) -> dict[str, Any]:
    return {} if think is None else {"think": think}


def is_marker(content: str, template: str) -> bool:
    """Whether the template writes this token as a marker. White space and words are text."""
    return content in template and content == content.strip() and not content.isalnum()


def match_any(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of the spellings; it matches nothing if there are none.

    Built as a prefix tree: trying a thousand spellings one by one takes seconds for a long text.
    """
    ordered = sorted(set(spellings))
    return re.compile(_prefix_tree(ordered) if ordered else r"(?!)")


def _prefix_tree(spellings: Sequence[str]) -> str:
    """The pattern of sorted spellings, grouped by their first character."""
    branches = []
    for _, alike in groupby(filter(None, spellings), key=lambda spelling: spelling[0]):
        group = list(alike)
        first, last = group[0], group[-1]
        shared = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        rests = [spelling[shared:] for spelling in group]
        branches.append(re.escape(first[:shared]) + ("" if rests == [""] else _prefix_tree(rests)))
    return f"(?:{'|'.join(branches)}){'?' if '' in spellings else ''}"


@dataclass(frozen=True)
class _Chat:
    """A rendered chat and what is hidden in it."""

    text: str
    hidden: _Hidden

    @property
    def revealed(self) -> str:
        return self.hidden.reveal(self.text) if self.hidden.spellings else self.text


class _Hidden:
    """Control tokens spelled by users, replaced by placeholders while a template is rendered."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self.spellings: list[str] = []

    def hide(self, value: Any, forbidden: re.Pattern[str]) -> Any:
        """The value with forbidden spellings in all its texts replaced by placeholders."""
        if isinstance(value, str):
            return forbidden.sub(self._placeholder, value)
        if isinstance(value, dict):
            return {self.hide(key, forbidden): self.hide(item, forbidden) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item, forbidden) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with placeholders turned back, also those that a template escaped."""
        start, stop = r"(?:\ue002|\\ue002)", r"(?:\ue003|\\ue003)"
        return re.sub(f"{start}{self._nonce}:(\\d+){stop}", lambda found: self.spellings[int(found.group(1))], text)

    def _placeholder(self, found: re.Match[str]) -> str:
        if found.group() not in self.spellings:  # a chat that is rendered again has the same placeholders
            self.spellings.append(found.group())
        return f"\ue002{self._nonce}:{self.spellings.index(found.group())}\ue003"


_POLL_SECONDS = 0.1  # of a request that waits for another's rendering
_lock = threading.Lock()
_process: SandboxProcess | None = None  # for all templates


def start_renderer() -> None:
    """Start the rendering process without waiting for it, so that the first chat begins sooner."""
    with _lock, suppress(RekindleError):  # raised again by the first chat, if there is one
        _render_process()


def make_renderer(template: str, bos: str, eos: str) -> Render:
    """A function that renders messages with a template, up to where the reply begins."""
    start_renderer()

    def render(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        think: Think | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        offered = {**think_variables(think), **({"tools": tools} if tools else {})}
        offered["add_generation_prompt"] = add_generation_prompt
        return render_template(template, {"messages": messages, **offered, "bos_token": bos, "eos_token": eos})

    return render


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template, up to where the reply begins. Raises `InvalidPrompt`."""
    try:
        message = json.dumps([template, {"add_generation_prompt": True, **variables}], default=_stand_in).encode()
        while not _lock.acquire(timeout=_POLL_SECONDS):
            check_cancelled()
        try:
            return _render_process().ask(message, is_cancelled).decode("utf-8", errors="surrogatepass")
        finally:
            _lock.release()
    except WorkRefused as refusal:
        raise InvalidPrompt(f"The model's chat template refuses these messages: {refusal}") from None
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidPrompt(f"The messages or tools cannot be written as JSON: {error}. Simplify them.") from None
    except LimitExceeded as limit:
        raise InvalidPrompt(
            f"The model's chat template cannot be rendered: {limit}. Shorten the chat, or use another model."
        ) from None


def _render_process() -> SandboxProcess:
    global _process
    if _process is None or not _process.usable:
        _process = SandboxProcess("rekindle.text.template_worker", b"")
    return _process


def _stand_in(value: object) -> str:
    """The stand-in for a value that is not JSON, as in transformers."""
    return f"<{type(value).__name__}>"
