"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply
from rekindle.core.tools import ToolCall
from rekindle.server.call import Call, plan_header
from rekindle.server.errors import ApiError
from rekindle.server.job import Finished, ReplyPart, ThoughtDelta
from rekindle.server.openai.responses_request import ResponsesRequest, responses_request, translate_input
from rekindle.server.protocol import WireProtocol, openai_error, typed_frame
from rekindle.server.reply_fields import new_id, rekindle_of, timings_of
from rekindle.text.tools.parse import CallDelta


def _failed_event(problem: ApiError) -> dict[str, Any]:
    error = {"code": problem.code or "server_error", "message": openai_error(problem)["error"]["message"]}
    return {"type": "response.failed", "response": {"object": "response", "status": "failed", "error": error}}


RESPONSES_API = WireProtocol("OpenAI", openai_error, typed_frame, stream_error=_failed_event)


async def answer_responses(call: Call, body: ResponsesRequest) -> Response:
    """The reply to a conversation of items, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    chat = translate_input(body)
    request = responses_request(body, chat, call.caller.tenant, call.service.reply_length())
    request, dropped = call.canonical(replace(request, adapter=adapter))
    events = call.service.answer([request], call.caller, body)
    ignored = sorted([*call.ignored(body), *chat.ignored, *dropped])
    head = _head(body, adapter or call.service.model)
    if body.stream:
        parts = call.parts(events, request)
        return await call.stream(events, lambda _: _numbered(_events(call, parts, head, ignored)))
    planned, (reply,) = await call.collect(events, 1)
    output = [
        *_thought_items(reply.thinking),
        *_message_items(reply.text),
        *(_call_item(one) for one in reply.tool_calls),
    ]
    if output and not reply.tool_calls:
        output[-1]["status"] = _status(reply)
    return JSONResponse(_ended(call, head, output, reply, ignored), headers=plan_header(planned))


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """The response before anything was written."""
    given = body.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p", "tool_choice"})
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        **given,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "model": model,
        "output": [],
        "previous_response_id": None,
        "store": False,
        "metadata": {},
        "usage": None,
    }


def _ended(
    call: Call, head: Mapping[str, Any], output: list[dict[str, Any]], reply: Reply, ignored: list[str]
) -> dict[str, Any]:
    thought_tokens = len(call.service.session.engine.tokenizer.encode(reply.thinking)) if reply.thinking else 0
    cut = {"length": "max_output_tokens"}.get(reply.finish_reason, reply.finish_reason)
    usage = {
        "input_tokens": reply.usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.usage.cached_tokens},
        "output_tokens": reply.usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": reply.usage.total_tokens,
    }
    return {
        **head,
        "status": "completed" if cut == "stop" else "incomplete",
        "incomplete_details": None if cut == "stop" else {"reason": cut},
        "output": output,
        "usage": usage,
        "timings": timings_of(reply),
        "rekindle": rekindle_of(reply.reuse, ignored),
    }


def _status(reply: Reply) -> str:
    """Of the item that was written last."""
    return "completed" if reply.finish_reason == "stop" else "incomplete"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message_items(text: str) -> list[dict[str, Any]]:
    content = [_text_part(text)]
    about = {"id": new_id("msg"), "status": "completed", "role": "assistant", "content": content}
    return [{"type": "message", **about}] if text else []


def _thought_items(text: str) -> list[dict[str, Any]]:
    about = {"id": new_id("rs"), "status": "completed", "summary": [], "content": [_thought_part(text)]}
    return [{"type": "reasoning", **about}] if text else []


def _call_item(call: ToolCall) -> dict[str, Any]:
    about = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": new_id("fc"), "status": "completed", **about}


async def _numbered(
    events: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[Mapping[str, Any], None]:
    number = 0
    async with aclosing(events):
        async for event in events:
            yield {**event, "sequence_number": number}
            number += 1


async def _events(
    call: Call, parts: AsyncGenerator[ReplyPart, None], head: Mapping[str, Any], ignored: list[str]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, from response.created to response.completed."""
    yield {"type": "response.created", "response": head}
    yield {"type": "response.in_progress", "response": head}
    items = _ItemEvents()
    async with aclosing(parts):
        async for item in parts:
            if isinstance(item.part, Finished):
                for event in items.close(_status(item.part.reply)):
                    yield event
                ended = _ended(call, head, items.output, item.part.reply, ignored)
                yield {"type": f"response.{ended['status']}", "response": ended}
            else:
                for event in items.add(item.part):
                    yield event


class _ItemEvents:
    """The events of output items: each is added, filled and done."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []  # those that are done
        self._open: dict[str, Any] | None = None  # the message or thought being written, with its text so far

    def add(self, part: ThoughtDelta | str | CallDelta) -> Iterator[dict[str, Any]]:
        if isinstance(part, CallDelta):
            yield from self._add_call(part)
            return
        thought = isinstance(part, ThoughtDelta)
        text = part.text if isinstance(part, ThoughtDelta) else part
        if self._open is None or self._open["type"] != ("reasoning" if thought else "message"):
            yield from self.close()
            (self._open,) = _thought_items(text) if thought else _message_items(text)
            yield self._event("output_item.added", item={**self._open, "status": "in_progress", "content": []})
            yield self._part_event("content_part.added", part=_thought_part("") if thought else _text_part(""))
        else:
            self._open["content"][0]["text"] += text
        yield self._part_event(f"{self._kind}.delta", delta=text)

    def _add_call(self, delta: CallDelta) -> Iterator[dict[str, Any]]:
        yield from self.close()
        item = _call_item(delta.call)
        where = {"item_id": item["id"]}
        yield self._event("output_item.added", item={**item, "status": "in_progress", "arguments": ""})
        yield self._event("function_call_arguments.delta", **where, delta=item["arguments"])
        yield self._event("function_call_arguments.done", **where, arguments=item["arguments"])
        yield self._event("output_item.done", item=item)
        self.output.append(item)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the message or the thought that is being written, if there is one."""
        if self._open is None:
            return
        (part,) = self._open["content"]
        yield self._part_event(f"{self._kind}.done", text=part["text"])
        yield self._part_event("content_part.done", part=part)
        self._open["status"] = status
        yield self._event("output_item.done", item=self._open)
        self.output.append(self._open)
        self._open = None

    @property
    def _kind(self) -> str:
        """The type of the open item's part."""
        assert self._open is not None
        kind: str = self._open["content"][0]["type"]
        return kind

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "output_index": len(self.output), **fields}

    def _part_event(self, name: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(name, item_id=self._open["id"], content_index=0, **fields)
