"""Request bodies: OpenAI's fields, and a few of our own.

Unknown fields are allowed, because clients send all sorts of them; the response lists them (`rekindle.ignored`).
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

from rekindle.core.request import MAX_QUOTES, MAX_STOPS, AnswersWay, ReuseLevel, Think
from rekindle.core.scope import AppState
from rekindle.knowledge.retrieve import MAX_PASSAGES, Retrieval

_T = TypeVar("_T")
Items = Annotated[
    list[_T], Field(fail_fast=True)
]  # else a million wrong items would be reported one by one, for minutes
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Number = StrictFloat | StrictInt
Text = StrictStr
Stop = Annotated[StrictStr, Field(max_length=1024)]  # every token is compared with each
MAX_CHOICES = 8
MAX_BIASES = 1024
MAX_TEXTS = 2048
MAX_DOCUMENTS = 1000
MAX_SALT = 1024  # characters
_PASSAGES = "Number of passages."
_RELEVANT = "Number of passages; default: the relevant ones, as many as the model can use."
_EFFORT = "How much the model thinks aloud first, if its template has a switch for that."
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_EFFORTS: dict[Effort | None, Think | None] = {
    None: None, "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"
}  # fmt: skip
_RETRIEVAL = "How passages are found: fused (BM25 and embeddings), weighted, bm25, embedding."


class RequestBody(BaseModel):
    """The base of all request bodies."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    def ignored(self) -> list[str]:
        """The fields that were sent and are unknown here, also in objects inside of it."""
        inner = [(name, value.ignored()) for name, value in self if isinstance(value, RequestBody)]
        return sorted([*(self.model_extra or {}), *(f"{name}.{one}" for name, some in inner for one in some)])


class CacheBody(RequestBody):
    """Fields for the cache and the app."""

    cache_salt: Text | None = Field(
        None, max_length=MAX_SALT, description="KV is shared only between requests with the same salt."
    )
    cache_prompt: StrictBool | None = Field(None, description="false: neither reuse nor keep KV.")
    app_id: Text | None = Field(
        None, max_length=256, description="The app that sends the request; apps get equal shares."
    )
    app_state: Literal["foreground", "background"] | None = Field(None, description="Whether the app is visible.")
    session_id: Text | None = Field(None, max_length=256, description="Used as app_id if that is missing.")
    prompt_cache_key: Text | None = Field(None, max_length=256, description="Used as app_id if that is missing.")
    user: Text | None = Field(None, max_length=256, description="Used as app_id if that is missing.")
    keep_alive: Text | Number | None = Field(
        None, description="How long the model stays in memory afterwards: 30s, 5m."
    )

    @property
    def app(self) -> str:
        """The app id: the first of these fields that is set."""
        return self.app_id or self.session_id or self.prompt_cache_key or self.user or ""


class StreamOptions(RequestBody):
    """What a stream contains besides text."""

    include_usage: StrictBool = False


class JsonSchema(RequestBody):
    """A schema and its name."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    name: Text = ""
    body: dict[str, Any] | StrictBool = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(RequestBody):
    """The format of the reply, enforced while it is generated."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    name: Text | None = None
    strict: StrictBool | None = None
    body: dict[str, Any] | StrictBool | None = Field(None, alias="schema", description="The schema itself.")


class StructuredOutputs(RequestBody):
    """The form of the reply as vLLM has it: one of these."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    body: Text | dict[str, Any] | None = Field(None, alias="json", description="A schema.")
    regex: Text | None = None
    choice: Annotated[Items[Text], Field(min_length=1, max_length=1024)] | None = None
    grammar: Text | None = Field(None, description="GBNF, or Lark with a rule `start`.")
    json_object: StrictBool | None = None


class FormBody(CacheBody):
    """The form of the reply, by every name that clients have for it; one of them."""

    response_format: ResponseFormat | None = None
    grammar: Text | None = Field(None, description="A GBNF grammar for the reply, as in llama.cpp.")
    json_schema: dict[str, Any] | StrictBool | None = Field(None, description="A schema for the reply, as there.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = Field(None, description="vLLM's older name.")
    guided_regex: Text | None = None
    guided_choice: Annotated[Items[Text], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = Field(None, description="Refused.")


Bias = Annotated[Number, Field(ge=-100, le=100)]


def _few_biases(given: object) -> object:
    """Checked before each is: pydantic reports every wrong one, which takes seconds for a hundred thousand."""
    if isinstance(given, (dict, list)) and len(given) > MAX_BIASES:
        raise ValueError(f"It has {len(given):,} tokens. Give up to {MAX_BIASES:,}")
    return given


FewBiases = BeforeValidator(_few_biases)
BiasByToken = Annotated[dict[Text, Bias], FewBiases]
Penalty = Annotated[Number, Field(gt=0, le=100)] | None


ReturnProgress = Annotated[
    StrictBool | None, Field(description="A stream begins with how far the prompt is read, as in llama.cpp.")
]


class SamplingFields(RequestBody):
    """How tokens are drawn, by the names that most protocols have for it."""

    temperature: Number | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, lt=2**31, description="0 and -1 mean all.")
    min_p: Number | None = Field(None, ge=0, le=1)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None


class SamplingBody(SamplingFields, FormBody):
    """Sampling parameters."""

    model: Text | None = Field(None, description="One of /v1/models; default: the base model.")
    temperature: Number | None = Field(None, ge=0, le=100, description="0 is greedy; default 1, as in OpenAI's API.")
    repetition_penalty: Penalty = None
    logit_bias: BiasByToken | None = None
    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES, description="Number of choices.")
    max_tokens: StrictInt | None = Field(None, ge=0, lt=2**31)
    min_tokens: StrictInt | None = Field(None, ge=0, lt=2**31, description="The reply has at least this many tokens.")
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    return_progress: ReturnProgress = None


class DocumentText(RequestBody):
    """A document in a request."""

    text: Text | None = None
    page_content: Text | None = Field(None, description="LangChain's name for text.")
    title: Text | None = Field(None, max_length=1024, description="Also searched; default: how the text begins.")

    @property
    def content(self) -> str:
        """The text, by either name."""
        return (self.page_content if self.text is None else self.text) or ""


class SourceText(DocumentText):
    """A document for the library."""

    source: Text | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="Where it comes from; a document of the same source is replaced.",
    )


def _form(value: object) -> str:
    return "text" if isinstance(value, (str, bytes)) else "document"


# Distinguished before validation, so that errors name the right one.
DocumentInput = Annotated[Annotated[Text, Tag("text")] | Annotated[DocumentText, Tag("document")], Discriminator(_form)]
SourceInput = Annotated[Annotated[Text, Tag("text")] | Annotated[SourceText, Tag("document")], Discriminator(_form)]


class RetrievalOptions(RequestBody):
    """How passages of the library are retrieved."""

    top_k: StrictInt | None = Field(None, ge=1, le=MAX_PASSAGES, description=_RELEVANT)
    retrieval: Retrieval = Field("fused", description=_RETRIEVAL)


_REUSE = "Reuse level, instead of the server's setting: exact, quantized, approximate, off."


_ANSWERS = "How stored answers are used: off, verified (drafts that the model checks), direct (given at once)."


class CompletionOptions(RequestBody):
    """Fields of a completion that OpenAI does not have."""

    reuse: ReuseLevel | None = Field(None, description=_REUSE)


class ChatOptions(CompletionOptions):
    """Fields of a chat that OpenAI does not have."""

    answers: AnswersWay | None = Field(None, description=_ANSWERS)

    documents: Annotated[Items[DocumentInput], Field(max_length=MAX_QUOTES)] | None = Field(
        None, description="Documents to quote before the first user message, as many as fit."
    )
    knowledge: RetrievalOptions | None = Field(
        None, description="Quote passages of the library, retrieved for the last user message."
    )


class ChatMessage(RequestBody):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Items[dict[str, Any]] | None = None


class TurnBody(RequestBody):
    """How the template ends a chat. A last message of the assistant is continued, whatever this says."""

    add_generation_prompt: StrictBool | None = Field(
        None, description="false: the template does not begin a message of the assistant."
    )
    continue_final_message: StrictBool | None = Field(
        None, description="true: refused unless the last message is the assistant's."
    )


class Prediction(RequestBody):
    """A draft of the reply: the model verifies it, which is faster than generating."""

    type: Literal["content"] = "content"
    content: Text | Items[dict[str, Any]]


class TemplateVariables(RequestBody):
    """The variables of a chat template that can be chosen."""

    enable_thinking: StrictBool | None = None
    thinking: StrictBool | None = None
    reasoning_effort: Effort | None = Field(None, description=_EFFORT)

    @property
    def think(self) -> Think | None:
        """Whether the model thinks aloud first, and how much; None: nothing is said of it."""
        switches = [one for one in (self.enable_thinking, self.thinking) if one is not None]
        effort = self.reasoning_effort
        return switches[0] if switches and (effort is None or not switches[0]) else _EFFORTS[effort]


class AgentBody(FormBody):
    """Fields that the bodies of agents' protocols share."""

    model: Text | None = Field(None, description="One of /v1/models; default: the base model.")
    temperature: Number | None = Field(None, ge=0, le=100, description="0 is greedy; default 1.")
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=0, description="0 means all.")
    stream: StrictBool | None = False
    rekindle: CompletionOptions | None = None


class OpenAiBody(SamplingBody):
    """The body of one of OpenAI's endpoints, with fields of our own under `rekindle`."""

    rekindle: CompletionOptions | None = None


class ChatRequest(TurnBody, OpenAiBody):
    """The body of /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=0, lt=2**31)
    logprobs: StrictBool | None = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = Field(None, description="true: several calls may be forced at once.")
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = Field(None, description=_EFFORT)
    chat_template_kwargs: TemplateVariables | None = None
    rekindle: ChatOptions | None = None

    @property
    def think(self) -> Think | None:
        """Whether the model thinks aloud first, and how much; None: nothing is said of it."""
        variables = self.chat_template_kwargs or TemplateVariables.model_validate({})
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return variables.model_copy(update=effort).think


class CompletionRequest(OpenAiBody):
    """The body of /v1/completions."""

    prompt: Text | Items[Text] | Items[Token] | Items[Items[Token]]
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    echo: StrictBool | None = False
    best_of: StrictInt | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: Text | None = None


class EmbeddingsRequest(RequestBody):
    """The body of /v1/embeddings."""

    input: Text | Items[Text] | Items[Token] | Items[Items[Token]]
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: StrictInt | None = Field(None, ge=1, description="Keep the first dimensions, normalized again.")
    user: Text | None = None


class TokenizeRequest(TurnBody):
    """The body of /tokenize: a text, or messages in the model's template."""

    content: Text | None = Field(None, description="As in llama.cpp: without `add_special`, the text's own tokens.")
    prompt: Text | None = Field(None, description="As in vLLM: with all tokens, unless `add_special_tokens` is false.")
    add_special: StrictBool | None = Field(None, description="Whether the token comes first that begins a text.")
    add_special_tokens: StrictBool | None = Field(None, description="vLLM's name for it.")
    messages: Items[ChatMessage] | None = None
    with_pieces: StrictBool = False
    model: Text | None = None


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    tokens: Items[Token]
    model: Text | None = None


class AppRequest(RequestBody):
    """The body of PUT /v1/rekindle/apps/{id}."""

    state: AppState
    cache_salt: Text | None = Field(None, max_length=MAX_SALT, description="The salt the app uses.")


class PromptRequest(CacheBody):
    """A prompt to warm."""

    messages: Items[ChatMessage] | None = None
    prompt: Text | Items[Token] | None = None
    model: Text | None = None


class ExplainRequest(CacheBody):
    """A prompt to explain, or the body of a chat in any protocol that is served here."""

    messages: Items[dict[str, Any]] | None = None
    input: Text | Items[dict[str, Any]] | None = Field(None, description="Of a body of /v1/responses.")
    prompt: Text | Items[Token] | None = None
    model: Text | None = None


class LoadAdapterRequest(RequestBody):
    """The body of /v1/load_lora_adapter."""

    lora_name: Text = Field(min_length=1, max_length=128, description="The model name for clients.")
    lora_path: Text = Field(min_length=1, max_length=4096, description="A folder saved by PEFT, on the server.")
    scale: Number = Field(1.0, description="Scaling factor of its effect.")
    model: Text | None = Field(None, description="The model that it belongs to; default: the first.")


class UnloadAdapterRequest(RequestBody):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Text = Field(min_length=1, max_length=128)
    model: Text | None = Field(None, description="The model that it belongs to; default: the first.")


class CheckRequest(RequestBody):
    """The body of /v1/rekindle/check."""

    fix: StrictBool = False


class AskRequest(SamplingBody):
    """The body of /v1/rekindle/ask."""

    question: Text = Field(min_length=1)
    top_k: StrictInt | None = Field(None, ge=1, le=MAX_PASSAGES, description=_RELEVANT)
    retrieval: Retrieval = Field("fused", description=_RETRIEVAL)
    instructions: Text | None = Field(None, min_length=1, description="Replaces the system message.")
    reuse: ReuseLevel | None = Field(None, description=_REUSE)
    answers: AnswersWay | None = Field(None, description=_ANSWERS)
    temperature: Number | None = Field(None, ge=0, le=100, description="Default 0, which is greedy.")
    n: StrictInt = Field(1, ge=1, le=1, description="A question has one answer.")


class SearchRequest(RequestBody):
    """The body of /v1/rekindle/search."""

    query: Text = Field(min_length=1)
    top_k: StrictInt = Field(5, ge=1, le=MAX_PASSAGES, description=_PASSAGES)
    retrieval: Retrieval = Field("fused", description=_RETRIEVAL)
    cache_salt: Text | None = Field(None, max_length=MAX_SALT, description="The salt of the documents.")


class DocumentsRequest(RequestBody):
    """The body of /v1/rekindle/documents."""

    documents: Items[SourceInput] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    app_id: Text | None = Field(
        None, max_length=256, description="The app they belong to, for `rekindle forget --app`."
    )
    cache_salt: Text | None = Field(None, max_length=MAX_SALT, description="They are found only with the same salt.")


class LibraryCheckRequest(RequestBody):
    """The body of /v1/rekindle/library/check."""

    fix: StrictBool = Field(False, description="Salvage a damaged library into a new file.")
    acknowledge: StrictBool = Field(False, description="Stop reporting what was lost.")
    cache_salt: Text | None = Field(None, max_length=MAX_SALT, description="The salt of the documents.")
