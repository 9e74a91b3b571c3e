"""Bodies of Ollama's API. Other fields and options are allowed, and named in the reply (`rekindle.ignored`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from rekindle.core.request import MAX_STOPS
from rekindle.server.schema import CacheBody, ChatOptions, Items, Number, RequestBody, Stop, Text

_MODEL = "One of /api/tags; default: the base model."


class ModelOptions(RequestBody):
    """Sampling, as Ollama has it."""

    temperature: Number | None = Field(None, ge=0, le=100, description="0 is greedy; default 0.8.")
    top_p: Number | None = Field(None, gt=0, le=1, description="Default 0.9.")
    top_k: StrictInt | None = Field(None, ge=0, lt=2**31, description="0 means all; default 40.")
    min_p: Number | None = Field(None, ge=0, le=1)
    repeat_penalty: Number | None = Field(None, gt=0, le=100)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**64, description="Negative: a fresh one each time.")
    num_predict: StrictInt | None = Field(None, ge=-(2**31), lt=2**31, description="Negative: as many as fit.")
    num_ctx: StrictInt | None = Field(None, ge=0, lt=2**31, description="Named as ignored: --context decides.")
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None


class OllamaBody(CacheBody):
    """What the bodies of chat and generate share."""

    model: Text | None = Field(None, description=_MODEL)
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description='"json", or the schema of the reply.')
    options: ModelOptions | None = None
    stream: StrictBool | None = Field(True, description="false: one object instead of lines.")
    think: StrictBool | Literal["low", "medium", "high"] | None = Field(
        None, description="Whether the model thinks aloud first, if its template has a switch for that."
    )
    rekindle: ChatOptions | None = None

    @property
    def sampling(self) -> ModelOptions:
        """The options; without any, all defaults."""
        return self.options or ModelOptions.model_validate({})

    @property
    def streamed(self) -> bool:
        """Whether the reply comes in lines; null is the default."""
        return self.stream is not False


class OllamaMessage(RequestBody):
    """A message of Ollama's API."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_name: Text | None = None
    images: list[Any] | None = Field(None, description="Refused: models read text here.")


class OllamaChatRequest(OllamaBody):
    """The body of /api/chat. Without messages the model is loaded, or freed if keep_alive is 0."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[dict[str, Any]] | None = None


class GenerateRequest(OllamaBody):
    """The body of /api/generate. Without a prompt the model is loaded, or freed if keep_alive is 0."""

    prompt: Text | None = None
    system: Text | None = None
    raw: StrictBool | None = Field(None, description="true: the prompt is continued as it is, without a template.")
    template: Text | None = Field(None, description="Refused: the model's own template is used.")
    context: Items[StrictInt] | None = Field(None, description="Refused: send the conversation to /api/chat.")
    suffix: Text | None = Field(None, description="What follows the reply, for models that can fill in the middle.")
    images: list[Any] | None = Field(None, description="Refused: models read text here.")


class EmbedRequest(RequestBody):
    """The body of /api/embed."""

    model: Text | None = None
    input: Text | Items[Text]
    truncate: StrictBool | None = Field(None, description="false: refuse texts longer than the embedder reads.")
    dimensions: StrictInt | None = Field(None, ge=1, description="Keep the first dimensions, normalized again.")


class OldEmbeddingsRequest(RequestBody):
    """The body of /api/embeddings, which /api/embed replaced."""

    model: Text | None = None
    prompt: Text


class ModelBody(RequestBody):
    """A body that names a model: /api/show, /api/delete."""

    model: Text | None = Field(None, description=_MODEL)
    name: Text | None = Field(None, description="The older name of `model`.")

    @property
    def named(self) -> str:
        """The name, by either field; "" if there is none."""
        return self.model or self.name or ""


class PullRequest(ModelBody):
    """The body of /api/pull."""

    stream: StrictBool | None = Field(True, description="false: one object at the end instead of lines.")
