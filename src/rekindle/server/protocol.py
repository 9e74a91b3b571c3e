"""What the core needs to know of a protocol: how it writes errors and streams.

The core takes a `Request` of the session (`Call.service.answer`) and gives back a `Reply`, or its parts while they
come (`reply_parts`). A protocol translates between these and its own JSON; none imports another. To add one:

1. `server/NAME/`: a subclass of `CacheBody` for each body, a function `answer_...(call, body)` for each endpoint.
2. In it, make a `Request.of(messages, **options)`: `cache_options` gives tenant, salt, app and reuse.
3. Whole: `call.collect(events, 1)`; streamed: `call.begin(events)`, `reply_parts(...)`, `call.stream(items, ...)`.
4. A `WireProtocol` with its errors and the frame of a stream's items; raise `ApiError`, the core writes it.
5. Rows in `routes.ENDPOINTS`, with `protocol=` (and a prefix in `routes.protocol_of` for paths it does not have).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from rekindle.server.errors import ApiError


def to_json(value: object) -> str:
    """Compact JSON; invalid Unicode is replaced."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


def _data_frame(item: Mapping[str, Any]) -> str:
    return f"data: {to_json(item)}\n\n"


def typed_frame(item: Mapping[str, Any]) -> str:
    """A server-sent event that is named by the item's `type`."""
    return f"event: {item['type']}\n{_data_frame(item)}"


@dataclass(frozen=True)
class WireProtocol:
    """How a protocol writes errors and streams.

    error         the body of an error response
    stream_error  an error as an item of a stream; None: as in a response
    frame         the text of one item of a stream
    ping          sent while no item comes, to keep the connection open
    end           the last text of a stream
    media_type    of a stream
    """

    name: str
    error: Callable[[ApiError], dict[str, Any]]
    frame: Callable[[Mapping[str, Any]], str] = _data_frame
    stream_error: Callable[[ApiError], dict[str, Any]] | None = None
    ping: str = ": waiting\n\n"
    end: str = ""
    media_type: str = "text/event-stream"

    def error_response(self, problem: ApiError) -> Response:
        """An error as a response of its own."""
        body = to_json(self.error(problem)).encode("utf-8")
        return Response(body, problem.status, problem.headers, media_type="application/json")


def openai_error(problem: ApiError) -> dict[str, Any]:
    """An error in OpenAI's format, which our own endpoints use too."""
    by_status = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = by_status.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    message = problem.message
    if problem.overflow is not None:  # in the words that clients look for
        words = "This model's maximum context length is {1} tokens. However, your messages resulted in {0} tokens. {2}"
        message = words.format(*problem.overflow, message)
    return {"error": {"message": message, "type": kind, "param": problem.param, "code": problem.code}}


OPENAI = WireProtocol("OpenAI", openai_error, end="data: [DONE]\n\n")
