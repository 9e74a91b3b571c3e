"""Bodies of Anthropic's API. Fields that are not here are allowed, and named in the reply (`rekindle.ignored`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from rekindle.core.request import MAX_STOPS
from rekindle.server.schema import AgentBody, CacheBody, Items, RequestBody, Stop, Text


class TurnMessage(RequestBody):
    """A message of Anthropic's API: a text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Text | Items[dict[str, Any]]


class NamedTool(RequestBody):
    """A tool of the client, or one that Anthropic's servers would run, which is left out."""

    type: Text | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolPolicy(RequestBody):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: StrictBool | None = None


class CallerMetadata(RequestBody):
    """Who asks."""

    user_id: Text | None = Field(None, description="Used as app_id if that is missing.")


class CountTokensRequest(CacheBody):
    """The body of /v1/messages/count_tokens."""

    model: Text | None = Field(None, description="One of /v1/models; default: the base model.")
    messages: Items[TurnMessage] = Field(min_length=1)
    system: Text | Items[dict[str, Any]] | None = None
    tools: Items[NamedTool] | None = None
    tool_choice: ToolPolicy | None = None
    metadata: CallerMetadata | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: every prompt is cached.")

    @property
    def app(self) -> str:
        """The app id; Claude Code sends one for each conversation."""
        sent = self.metadata.user_id if self.metadata is not None else None
        return super().app or (sent or "")[:256]

    @property
    def caches(self) -> bool:
        """Whether something is marked with `cache_control`."""
        system = self.system if isinstance(self.system, list) else []
        blocks = [block for m in self.messages if isinstance(m.content, list) for block in m.content]
        tools = [tool.model_extra or {} for tool in self.tools or ()]
        return self.cache_control is not None or any("cache_control" in one for one in (*system, *blocks, *tools))


class MessagesRequest(CountTokensRequest, AgentBody):
    """The body of /v1/messages."""

    max_tokens: StrictInt = Field(ge=0, lt=2**31)
    stop_sequences: Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
