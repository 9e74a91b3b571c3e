"""llama.cpp's own endpoints: /completion and /infill, /props, /slots and /apply-template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply, SampledToken, TextPiece, TokenLogprob
from rekindle.core.request import Message, Options, PromptLike, Request
from rekindle.server.body import cache_options, messages_of
from rekindle.server.call import Call, plan_header
from rekindle.server.errors import ApiError
from rekindle.server.job import ChoiceEvent, Finished
from rekindle.server.llamacpp.schema import (
    ApplyTemplateRequest,
    InfillRequest,
    NativeCompletionRequest,
    NativeSamplingBody,
)
from rekindle.server.protocol import WireProtocol
from rekindle.server.reply_fields import rekindle_of, timings_of
from rekindle.text.fill_in import OtherFile

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 501: "not_supported_error",
          503: "unavailable_error"}  # fmt: skip


def _error(problem: ApiError) -> dict[str, Any]:
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    error: dict[str, Any] = {"code": problem.status, "message": problem.message, "type": kind}
    if problem.overflow is not None:
        tokens, context = problem.overflow
        error |= {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}
    return {"error": error}


LLAMACPP = WireProtocol("LlamaCpp", _error)


_MAX_PROMPTS = 64
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0,
             "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip


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
    tokens = await call.in_thread(lambda: session.fill_in_prompt(prefix, body.input_suffix, files))
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

    return [await call.in_thread(joined)]


async def _answer(call: Call, body: NativeSamplingBody, prompts: Sequence[PromptLike], adapter: str) -> Response:
    options = _options(call, body)
    requests = [replace(Request.of(prompt, **options), adapter=adapter) for prompt in prompts]
    ignored = [
        *call.ignored(body),
        *(f"rekindle.{name}" for name in (body.rekindle.ignored() if body.rekindle else ())),
    ]
    replies = _NativeReplies(body, requests, adapter or call.service.model, sorted(ignored))
    events = call.service.answer(requests, call.caller, body)
    if body.stream:
        return await call.stream(events, lambda _: replies.chunks(events))
    planned, collected = await call.collect(events, len(requests))
    whole = [replies.last(number, reply, reply.text, reply.logprobs) for number, reply in enumerate(collected)]
    return JSONResponse(whole[0] if len(whole) == 1 else whole, headers=plan_header(planned))


def _options(call: Call, body: NativeSamplingBody) -> Options:
    length, options = call.service.reply_length(), cache_options(body, call.caller.tenant)
    settings = _settings(body)
    wanted = body.n_predict
    options["max_tokens"] = length.longest if wanted is not None and wanted < 0 else length.of(wanted)
    options["repetition_penalty"] = settings["repeat_penalty"]
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        options[name] = settings[name]
    options["top_k"] = settings["top_k"] or None
    if body.seed is not None and body.seed >= 0:
        options["seed"] = body.seed
    if body.stop:
        options["stop"] = body.stop
    if body.ignore_eos:
        options["min_tokens"] = options["max_tokens"]
    if body.logit_bias:
        options["logit_bias"] = _bias(body.logit_bias)
    if body.grammar and body.json_schema is not None:
        raise ApiError(400, "Give either a grammar or a json_schema.", param="grammar")
    if body.grammar:
        options["grammar"] = Grammar.gbnf(body.grammar)
    elif body.json_schema is not None:
        options["grammar"] = Grammar.json_schema(body.json_schema)
    if body.n_probs or body.return_tokens:
        options["logprobs"] = body.n_probs
    return options


def _settings(body: NativeSamplingBody) -> dict[str, Any]:
    """The sampling of a reply: what was given, else llama.cpp's defaults."""
    given = body.model_dump(include=set(_DEFAULTS), exclude_none=True)
    return {**_DEFAULTS, **given}


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
    model: str
    ignored: Sequence[str]

    async def chunks(self, events: AsyncGenerator[ChoiceEvent, None]) -> AsyncGenerator[Mapping[str, Any], None]:
        """A chunk for each piece of text; the last one of a reply has its counts and times."""
        sent = [0 for _ in self.requests]  # tokens
        async for item in events:
            if isinstance(item.event, TextPiece):
                drawn = item.event.logprobs
                sent[item.choice] += len(drawn)
                yield self._chunk(item.choice, item.event, drawn, stop=False)
            elif isinstance(item.event, Finished):
                reply = item.event.reply
                yield self.last(item.choice, reply, "", reply.logprobs[sent[item.choice] :])

    def _chunk(self, number: int, text: str, drawn: Sequence[SampledToken], *, stop: bool) -> dict[str, Any]:
        tokens = [one.chosen.token for one in drawn] if self.body.return_tokens else []
        chunk = {"index": number, "content": text, "tokens": tokens, "id_slot": number, "stop": stop}
        if self.body.n_probs and drawn:
            chunk["completion_probabilities"] = [
                {**_likelihood(one.chosen), "top_logprobs": [_likelihood(other) for other in one.top]} for one in drawn
            ]
        return chunk

    def last(self, number: int, reply: Reply, text: str, drawn: Sequence[SampledToken]) -> dict[str, Any]:
        """The end of a reply."""
        request = self.requests[number]
        stop_type = {"stop": "eos", "length": "limit"}.get(reply.finish_reason, reply.finish_reason)
        settings = {"n_predict": request.max_tokens, "stop": list(request.stop), "seed": request.sampling.seed}
        return {
            **self._chunk(number, text, drawn, stop=True),
            "model": self.model,
            "tokens_predicted": reply.usage.completion_tokens,
            "tokens_evaluated": reply.usage.prompt_tokens,
            "generation_settings": {**_settings(self.body), **settings},
            "prompt": request.prompt,
            "has_new_line": "\n" in reply.text,
            "truncated": False,
            "stop_type": "word" if reply.stopped_by is not None else stop_type,
            "stopping_word": reply.stopped_by or "",
            "tokens_cached": reply.usage.cached_tokens,
            "timings": timings_of(reply),
            "rekindle": rekindle_of(reply.reuse, self.ignored),
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
            "total_slots": service.line.places,
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
    return JSONResponse([_slot(call, number) for number in range(call.service.line.places)])


def _slot(call: Call, number: int) -> dict[str, Any]:
    busy = call.caller.operator and number < call.service.line.running
    context = call.service.session.engine.context_tokens
    return {"id": number, "n_ctx": context, "speculative": False, "is_processing": busy, "params": {}, "prompt": ""}


async def apply_template(call: Call, body: ApplyTemplateRequest) -> Response:
    """The prompt that messages become by the model's template, its control tokens spelled out."""
    call.adapter_of(body.model)
    variables = body.chat_template_kwargs
    think = None if variables is None else variables.think
    request = Request.of(messages_of(body.messages), tools=body.tools or (), think=think)
    messages = [message for message in request.prompt if isinstance(message, Message)]
    session = call.service.session

    def applied() -> str:
        with session.staying():
            engine = session.engine
            tokens = engine.tokenizer.encode_chat(
                messages, tools=request.tools, think=think, token_limit=engine.context_tokens
            )
            return engine.tokenizer.spell(tokens)

    ignored = [
        *body.ignored(),
        *(f"chat_template_kwargs.{name}" for name in (variables.ignored() if variables else ())),
    ]
    return JSONResponse({"prompt": await call.in_thread(applied), "rekindle": {"ignored": ignored}})
