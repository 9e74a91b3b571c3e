"""Bodies of llama.cpp's endpoints. Other fields are allowed, and named in the reply (`rekindle.ignored`)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from rekindle.core.request import MAX_STOPS
from rekindle.server.schema import (
    CacheBody,
    ChatMessage,
    CompletionOptions,
    Items,
    Number,
    RequestBody,
    Stop,
    TemplateVariables,
    Text,
    Token,
)

_MODEL = "One of /v1/models; default: the base model."
Bias = Annotated[Number, Field(ge=-100, le=100)]
BiasPairs = Annotated[Items[Annotated[list[Any], Field(min_length=2, max_length=2)]], Field(max_length=1024)]


class NativeSamplingBody(CacheBody):
    """Sampling, as llama.cpp's server has it."""

    model: Text | None = Field(None, description=_MODEL)
    n_predict: StrictInt | None = Field(None, ge=-2, lt=2**31, description="Negative: as many as fit.")
    temperature: Number | None = Field(None, ge=0, le=100, description="0 is greedy; default 0.8.")
    top_k: StrictInt | None = Field(None, ge=0, lt=2**31, description="0 means all; default 40.")
    top_p: Number | None = Field(None, gt=0, le=1, description="Default 0.95.")
    min_p: Number | None = Field(None, ge=0, le=1, description="Default 0.05.")
    repeat_penalty: Number | None = Field(None, gt=0, le=100)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: BiasPairs | Annotated[dict[Text, Bias], Field(max_length=1024)] | None = Field(
        None, description="Pairs of a token id and a number, or an object of them."
    )
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**64, description="Negative: a fresh one each time.")
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: StrictBool = Field(False, description="The reply does not end before n_predict tokens.")
    grammar: Text | None = Field(None, description="A GBNF grammar for the reply.")
    json_schema: dict[str, Any] | None = Field(None, description="A schema for the reply.")
    n_probs: StrictInt = Field(0, ge=0, le=20, description="Log probabilities of each token and this many others.")
    return_tokens: StrictBool = Field(False, description="The tokens of the reply, too.")
    stream: StrictBool | None = False
    rekindle: CompletionOptions | None = None


class NativeCompletionRequest(NativeSamplingBody):
    """The body of /completion."""

    prompt: Text | Items[Text | Token] | Items[Items[Token]] = Field(
        description="A text, token ids, texts and token ids in one list, or a list of prompts."
    )


class InfillFile(RequestBody):
    """A file beside the one that is written."""

    filename: Text = ""
    text: Text = ""


class InfillRequest(NativeSamplingBody):
    """The body of /infill."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[Items[InfillFile], Field(max_length=1024)] | None = None
    prompt: Text = Field("", description="Goes behind the prefix.")


class ApplyTemplateRequest(RequestBody):
    """The body of /apply-template."""

    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    model: Text | None = Field(None, description=_MODEL)
