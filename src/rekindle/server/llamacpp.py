"""llama.cpp's own endpoints: /completion and /infill, /props, /slots and /apply-template.

Other fields are allowed, and named in the reply (`rekindle.ignored`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt
from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.core.reply import PromptProgress, Reply, TextPiece, TokenLogprob
from rekindle.core.request import Options, PromptLike, Request
from rekindle.server.body import begins_turn, cache_options, messages_of, sampling_options
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.job import Finished
from rekindle.server.pending_reply import PendingReply
from rekindle.server.protocol import WireProtocol, error_kind
from rekindle.server.reply_fields import timings_of
from rekindle.server.reply_form import grammar_of
from rekindle.server.schema import (
    Bias,
    ChatMessage,
    CompletionOptions,
    FewBiases,
    FormBody,
    Items,
    Penalty,
    RequestBody,
    ReturnProgress,
    SamplingFields,
    TemplateVariables,
    Text,
    Token,
    TurnBody,
)
from rekindle.text.fill_in import OtherFile

_MODEL = "One of /v1/models; default: the base model."
BiasPairs = Items[Annotated[list[Any], Field(min_length=2, max_length=2)]]


class NativeSamplingBody(SamplingFields, FormBody):
    """Sampling, as llama.cpp's server has it, with its defaults."""

    model: Text | None = Field(None, description=_MODEL)
    n_predict: StrictInt | None = Field(None, ge=-2, lt=2**31, description="Negative: as many as fit.")
    repeat_penalty: Penalty = None
    logit_bias: Annotated[BiasPairs | dict[Text, Bias] | None, FewBiases] = Field(
        None, description="Pairs of a token id and a number, or an object of them."
    )
    ignore_eos: StrictBool = Field(False, description="The reply does not end before n_predict tokens.")
    n_probs: StrictInt = Field(0, ge=0, le=20, description="Log probabilities of each token and this many others.")
    return_tokens: StrictBool = Field(False, description="The tokens of the reply, too.")
    return_progress: ReturnProgress = None
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


class ApplyTemplateRequest(TurnBody):
    """The body of /apply-template."""

    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    model: Text | None = Field(None, description=_MODEL)


_KINDS = {501: "not_supported_error", 503: "unavailable_error"}


def _error(problem: ApiError) -> dict[str, Any]:
    error: dict[str, Any] = {"code": problem.status, "message": problem.message, "type": error_kind(problem, _KINDS)}
    if problem.overflow is not None:
        tokens, context = problem.overflow
        error |= {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}
    return {"error": error}


LLAMACPP = WireProtocol("LlamaCpp", _error)


_MAX_PROMPTS = 64
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_SHOWN_DEFAULTS = {**_DEFAULTS, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


async def answer_native_completion(call: Call, body: NativeCompletionRequest) -> Response:
    """The continuation of a text in llama.cpp's format, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    prompts = await _prompts(call, body.prompt)
    if not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise ApiError(400, f"Give 1 to {_MAX_PROMPTS} prompts.", param="prompt")
    return await _answer(call, body, prompts, adapter)


async def answer_infill(call: Call, body: InfillRequest) -> Response:
    """The text between a prefix and a suffix in llama.cpp's format, whole or as a stream."""
    adapter, session = call.adapter_of(body.model), call.service.session
    files = [OtherFile(file.filename, file.text) for file in body.input_extra or ()]
    prefix = body.input_prefix + body.prompt
    tokens = await call.tokenized(lambda: session.fill_in_prompt(prefix, body.input_suffix, files))
    return await _answer(call, body, [tokens], adapter)


async def _prompts(call: Call, given: str | Sequence[Any]) -> list[PromptLike]:
    """One prompt or several; a list of texts and token ids is one prompt."""
    kinds = set() if isinstance(given, str) else {type(item) for item in given}
    for prompt in given if kinds == {list} else [given]:
        call.check_tokens(prompt)
    if kinds != {str, int}:
        return [given] if isinstance(given, str) or kinds == {int} else list(given)
    session = call.service.session

    def joined() -> list[int]:
        with session.staying():
            encode, lead = session.engine.tokenizer.encode, len(session.engine.tokenizer.encode(""))
            parts = [encode(part) if isinstance(part, str) else [part] for part in given]
        starts = [lead if number and isinstance(part, str) else 0 for number, part in enumerate(given)]
        return [token for part, start in zip(parts, starts, strict=True) for token in part[start:]]

    return [await call.tokenized(joined)]


async def _answer(call: Call, body: NativeSamplingBody, prompts: Sequence[PromptLike], adapter: str) -> Response:
    options = _options(call, body)
    requests = [replace(Request.of(prompt, **options), adapter=adapter) for prompt in prompts]
    events = call.service.answer(requests, call.caller, body)
    pending = PendingReply(call, requests[0], events, call.ignored(body), len(requests))
    writer = _NativeReplies(body, requests, pending)

    def whole(replies: list[Reply]) -> Any:
        found = [writer.whole(number, reply) for number, reply in enumerate(replies)]
        return found[0] if len(found) == 1 else found

    return await pending.respond(body.stream, lambda _: writer.chunks(), whole)


def _options(call: Call, body: NativeSamplingBody) -> Options:
    options = cache_options(body, call.caller.tenant) | sampling_options(body, **_DEFAULTS)
    options["max_tokens"] = call.service.reply_length().of(body.n_predict)
    if body.seed is not None and body.seed >= 0:
        options["seed"] = body.seed
    if body.ignore_eos:
        options["min_tokens"] = options["max_tokens"]
    if body.logit_bias:
        options["logit_bias"] = _bias(body.logit_bias)
    options["grammar"] = grammar_of(body)
    if body.n_probs:
        options["logprobs"] = body.n_probs
    return options


def _bias(given: Sequence[Sequence[Any]] | Mapping[str, Any]) -> dict[int, float]:
    """The bias of each token; false is the lowest there is."""
    found = {}
    for token, bias in given.items() if isinstance(given, Mapping) else given:
        number = -100.0 if bias is False else bias
        known = str(token).isascii() and str(token).isdigit() and len(str(token)) < 10
        if not known or isinstance(number, bool) or not isinstance(number, (int, float)) or not -100 <= number <= 100:
            message = "logit_bias: Give pairs of a token id and a number from -100 to 100."
            raise ApiError(400, message, param="logit_bias")
        found[int(token)] = float(number)
    return found


@dataclass(frozen=True)
class _NativeReplies:
    """The replies to the prompts of a body, as llama.cpp's server writes them."""

    body: NativeSamplingBody
    requests: Sequence[Request]
    pending: PendingReply

    async def chunks(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """A chunk for each piece of text; the last one of a reply has its counts and times."""
        sent = [0 for _ in self.requests]  # tokens
        async for item in self.pending.events:
            if isinstance(item.event, TextPiece):
                sent[item.choice] += len(item.event.tokens)
                yield {**self._chunk(item.choice, item.event), "stop": False}
            elif isinstance(item.event, PromptProgress):
                yield {**self._chunk(item.choice, TextPiece("")), "stop": False, **item.event.as_event()}
            elif isinstance(item.event, Finished):
                reply, first = item.event.reply, sent[item.choice]
                rest = TextPiece("", reply.logprobs[first:], self._tokens(reply)[first:])
                yield {**self._chunk(item.choice, rest), **self._end(item.choice, reply)}

    def whole(self, number: int, reply: Reply) -> dict[str, Any]:
        """A reply that is not streamed: it has its tokens only if they were asked for."""
        tokens = self._tokens(reply) if self.body.return_tokens else ()
        piece = TextPiece(reply.text, reply.logprobs, tokens)
        return {**self._chunk(number, piece), **self._end(number, reply)}

    def _tokens(self, reply: Reply) -> tuple[int, ...]:
        """The tokens of a reply without the one that ends it."""
        stops = self.pending.call.service.session.engine.tokenizer.stop_ids
        return tuple(token for token in reply.tokens if token not in stops)

    def _chunk(self, number: int, piece: TextPiece) -> dict[str, Any]:
        chunk = {"index": number, "content": piece, "tokens": list(piece.tokens), "id_slot": number}
        if self.body.n_probs and piece.logprobs:
            chunk["completion_probabilities"] = [
                {**_likelihood(one.chosen), "top_logprobs": [_likelihood(other) for other in one.top]}
                for one in piece.logprobs
            ]
        return chunk

    def _end(self, number: int, reply: Reply) -> dict[str, Any]:
        request = self.requests[number]
        stop_type = {"stop": "eos", "length": "limit"}.get(reply.finish_reason, reply.finish_reason)
        given = self.body.model_dump(include=set(_SHOWN_DEFAULTS), exclude_none=True)
        own = {"n_predict": request.max_tokens, "stop": list(request.stop), "seed": request.sampling.seed}
        return {
            "stop": True,
            "model": self.pending.model,
            "tokens_predicted": reply.usage.completion_tokens,
            "tokens_evaluated": reply.usage.prompt_tokens,
            "generation_settings": {**_SHOWN_DEFAULTS, **given, **own},
            "prompt": request.prompt,
            "has_new_line": "\n" in reply.text,
            "truncated": False,
            "stop_type": "word" if reply.stopped_by is not None else stop_type,
            "stopping_word": reply.stopped_by or "",
            "tokens_cached": reply.usage.cached_tokens,
            "timings": timings_of(reply),
            "rekindle": self.pending.about(reply),
        }


def _likelihood(one: TokenLogprob) -> dict[str, Any]:
    text = one.text.decode("utf-8", "replace")
    return {"id": one.token, "token": text, "bytes": list(one.text), "logprob": one.logprob}


async def show_props(call: Call) -> Response:
    """The model and its limits, as llama.cpp's server shows them."""
    service = call.service
    return JSONResponse(
        {
            "default_generation_settings": _slot(call, 0),
            "total_slots": service.admission.places,
            "model_alias": service.model,
            "model_path": service.model,
            "chat_template": await call.template(),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"rekindle {__version__}",
        }
    )


async def list_slots(call: Call) -> Response:
    """How many requests are answered at the same time, as llama.cpp's server shows it; nobody's prompts."""
    call.require_operator()
    return JSONResponse([_slot(call, number) for number in range(call.service.admission.places)])


def _slot(call: Call, number: int) -> dict[str, Any]:
    busy = call.caller.operator and number < call.service.admission.running
    context = call.service.session.engine.context_tokens
    return {"id": number, "n_ctx": context, "speculative": False, "is_processing": busy, "params": {}, "prompt": ""}


async def apply_template(call: Call, body: ApplyTemplateRequest) -> Response:
    """The prompt that messages become by the model's template, its control tokens spelled out."""
    call.adapter_of(body.model)
    variables = body.chat_template_kwargs
    think = None if variables is None else variables.think
    begins = begins_turn(body, body.messages)
    request = Request.of(
        messages_of(body.messages), tools=body.tools or (), think=think, add_generation_prompt=begins, max_tokens=0
    )
    engine = call.service.session.engine
    tokens = await call.encode_chat(request, token_limit=engine.context_tokens)

    def spelled() -> str:
        with call.service.session.staying():
            return engine.tokenizer.spell(tokens)

    return JSONResponse({"prompt": await call.tokenized(spelled), "rekindle": {"ignored": body.ignored()}})
