"""What may be asked over HTTP: OpenAI's forms, and the few fields of our own.

Fields that nobody knows are allowed, because clients send all sorts of them; the reply names them (`rekindle.ignored`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
)

from rekindle.apps.state import state_of
from rekindle.core.app import AppState
from rekindle.core.request import MOST_QUOTES, MOST_STOPS, AnswersWay, ReuseLevel
from rekindle.errors import InvalidSetting
from rekindle.knowledge.retrieve import MOST_PASSAGES, Retrieval

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]  # else each of a million wrong ones would be told, for minutes
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Number = StrictFloat | StrictInt
Text = StrictStr
Stop = Annotated[StrictStr, Field(max_length=1024)]  # every token is compared with all of them
MOST_CHOICES = 8
MOST_TEXTS = 2048
MOST_DOCUMENTS = 1000
_PASSAGES = "How many passages."
_RETRIEVAL = "How they are found: fused (by words and by meaning), weighted, bm25, embedding."


class Asked(BaseModel):
    """What every body has in common."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    def ignored(self) -> list[str]:
        """The fields that were sent and mean nothing here."""
        return sorted(self.model_extra or {})


def _as_state(given: object) -> object:
    """The state that a name of iOS or Android means; anything else as it is, to be refused."""
    try:
        return state_of(given) if isinstance(given, str) else given
    except InvalidSetting:
        return given


class Cached(Asked):
    """Whose request it is, and what of the cache it may use."""

    cache_salt: Text | None = Field(None, max_length=1024, description="KV is shared only where this is the same.")
    cache_prompt: StrictBool | None = Field(None, description="false: compute everything, keep nothing.")
    app_id: Text | None = Field(None, max_length=256, description="The app that asks; apps get equal shares.")
    app_state: Annotated[Literal["foreground", "background"], BeforeValidator(_as_state)] | None = Field(
        None, description="Whether somebody looks at it. Names of the iOS and Android lifecycle are understood."
    )
    session_id: Text | None = Field(None, max_length=256, description="Stands in for app_id.")
    prompt_cache_key: Text | None = Field(None, max_length=256, description="Stands in for app_id.")
    user: Text | None = Field(None, max_length=256, description="Stands in for app_id.")
    keep_alive: Text | Number | None = Field(None, description="How long the model stays in memory after it: 30s, 5m.")

    @property
    def app(self) -> str:
        """Who asks, by the first name that was given."""
        return self.app_id or self.session_id or self.prompt_cache_key or self.user or ""


class StreamOptions(Asked):
    """What a stream has besides text."""

    include_usage: StrictBool = False


class JsonSchema(Asked):
    """A schema and its name."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    name: Text = ""
    body: dict[str, Any] | StrictBool = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Asked):
    """What form the reply has to have; it is enforced while it is being written."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampled(Cached):
    """How a reply is drawn."""

    model: Text | None = Field(None, description="One of /v1/models; without it, the one that is served.")
    temperature: Number | None = Field(None, ge=0, le=100, description="0 is greedy; without it 1, as with OpenAI.")
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, description="0 and -1 mean all.")
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Number | None = Field(None, gt=0, le=100)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[Items[Stop], Field(max_length=MOST_STOPS)] | None = None
    n: StrictInt = Field(1, ge=1, le=MOST_CHOICES, description="How many replies.")
    max_tokens: StrictInt | None = Field(None, ge=0, lt=2**31)
    min_tokens: StrictInt | None = Field(None, ge=0, lt=2**31, description="The reply does not end before.")
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Text | None = Field(None, description="A GBNF grammar that the reply has to obey, as llama.cpp has it.")


class DocumentText(Asked):
    """A document that somebody gives."""

    text: Text | None = None
    page_content: Text | None = Field(None, description="In place of text, as LangChain calls it.")
    title: Text | None = Field(None, max_length=1024, description="For people, and found by; else how it begins.")

    @property
    def said(self) -> str:
        """What it says, by whichever name."""
        return (self.page_content if self.text is None else self.text) or ""


class SourceText(DocumentText):
    """A document for the library."""

    source: Text | None = Field(
        None, min_length=1, max_length=4096, description="Where it comes from: one of the same source is replaced."
    )


def _form(given: object) -> str:
    return "text" if isinstance(given, (str, bytes)) else "document"


# Told apart before they are looked at, so that what is wrong is told of the right one.
GivenDocument = Annotated[Annotated[Text, Tag("text")] | Annotated[DocumentText, Tag("document")], Discriminator(_form)]
GivenSource = Annotated[Annotated[Text, Tag("text")] | Annotated[SourceText, Tag("document")], Discriminator(_form)]


class Retrieving(Asked):
    """What is looked for in the library."""

    top_k: StrictInt = Field(5, ge=1, le=MOST_PASSAGES, description=_PASSAGES)
    retrieval: Retrieval = Field("fused", description=_RETRIEVAL)


_REUSE = "What may be reused, in place of the server's setting: exact, near, approximate, off."


_ANSWERS = "Whether earlier answers help: off, verified (drafts that the model checks), direct (given at once)."


class ChatOptions(Asked):
    """What a chat may have beside OpenAI's fields."""

    reuse: ReuseLevel | None = Field(None, description=_REUSE)
    answers: AnswersWay | None = Field(None, description=_ANSWERS)

    documents: Annotated[Items[GivenDocument], Field(max_length=MOST_QUOTES)] | None = Field(
        None, description="What the chat is about: quoted before what the user first says, as many as fit."
    )
    knowledge: Retrieving | None = Field(
        None, description="The same with passages of the library, found for what the user last said."
    )


class ChatMessage(Asked):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Items[dict[str, Any]] | None = None


class Prediction(Asked):
    """What the reply may well be: the model checks it, which is faster than writing."""

    type: Literal["content"] = "content"
    content: Text | Items[dict[str, Any]]


class ChatRequest(Sampled):
    """The body of /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=0, lt=2**31)
    logprobs: StrictBool | None = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = Field(None, description="false: a forced call is only one.")
    prediction: Prediction | None = None
    rekindle: ChatOptions | None = None

    def ignored(self) -> list[str]:
        """The fields that were sent and mean nothing here."""
        own = [] if self.rekindle is None else [f"rekindle.{name}" for name in self.rekindle.ignored()]
        return sorted([*super().ignored(), *own])


class CompletionRequest(Sampled):
    """The body of /v1/completions."""

    prompt: Text | Items[Text] | Items[Token] | Items[Items[Token]]
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    echo: StrictBool | None = False
    best_of: StrictInt | None = Field(None, ge=1, le=MOST_CHOICES)
    suffix: Text | None = None


class EmbeddingsRequest(Asked):
    """The body of /v1/embeddings."""

    input: Text | Items[Text] | Items[Token] | Items[Items[Token]]
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: StrictInt | None = Field(None, ge=1, description="So many of the first ones, to unit length again.")
    user: Text | None = None


class TokenizeRequest(Asked):
    """The body of /tokenize: a text, or messages in the model's template."""

    content: Text | None = None
    prompt: Text | None = None
    messages: Items[ChatMessage] | None = None
    with_pieces: StrictBool = False
    model: Text | None = None


class DetokenizeRequest(Asked):
    """The body of /detokenize."""

    tokens: Items[Token]
    model: Text | None = None


class AppRequest(Asked):
    """The body of PUT /v1/rekindle/apps/{id}."""

    state: Annotated[AppState, BeforeValidator(_as_state)] = Field(description="Or as iOS or Android call it.")


class PromptRequest(Cached):
    """A prompt to warm or to explain."""

    messages: Items[ChatMessage] | None = None
    prompt: Text | Items[Token] | None = None
    model: Text | None = None


class LoadAdapterRequest(Asked):
    """The body of /v1/load_lora_adapter."""

    lora_name: Text = Field(min_length=1, max_length=128, description="The model name that clients will ask for.")
    lora_path: Text = Field(min_length=1, max_length=4096, description="A folder that PEFT saved, on the server.")
    scale: Number = Field(1.0, description="Times its own effect.")


class UnloadAdapterRequest(Asked):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Text = Field(min_length=1, max_length=128)


class CheckRequest(Asked):
    """The body of /v1/rekindle/check."""

    fix: StrictBool = False


class AskRequest(Sampled):
    """The body of /v1/rekindle/ask."""

    question: Text = Field(min_length=1)
    top_k: StrictInt = Field(5, ge=1, le=MOST_PASSAGES, description=_PASSAGES)
    retrieval: Retrieval = Field("fused", description=_RETRIEVAL)
    instructions: Text | None = Field(None, min_length=1, description="In place of the system message.")
    reuse: ReuseLevel | None = Field(None, description=_REUSE)
    answers: AnswersWay | None = Field(None, description=_ANSWERS)
    temperature: Number | None = Field(None, ge=0, le=100, description="Without it 0, which is greedy.")
    n: StrictInt = Field(1, ge=1, le=1, description="A question has one answer.")


class SearchRequest(Retrieving):
    """The body of /v1/rekindle/search."""

    query: Text = Field(min_length=1)
    cache_salt: Text | None = Field(None, max_length=1024, description="Whose documents: those of the same salt.")


class DocumentsRequest(Asked):
    """The body of /v1/rekindle/documents."""

    documents: Items[GivenSource] = Field(min_length=1, max_length=MOST_DOCUMENTS)
    app_id: Text | None = Field(None, max_length=256, description="Whose they are, for `rekindle forget --app`.")
    cache_salt: Text | None = Field(None, max_length=1024, description="They are found with the same salt only.")
