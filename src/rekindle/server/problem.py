"""What went wrong, in OpenAI's shape."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from rekindle.errors import (
    AdapterNotFound,
    AdapterRefused,
    Cancelled,
    Closed,
    ContextOverflow,
    DocumentNotFound,
    EntryNotFound,
    InvalidSetting,
    KnowledgeUnusable,
    ModelError,
    ModelNotFound,
    NothingKnown,
    OutOfMemory,
    RekindleError,
    RequestError,
)

log = logging.getLogger("rekindle.server")


class Problem(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's word for this sort of error."""
        by_status = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        if self.status == 429:
            return "rate_limit_error"
        return by_status.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def outcome(self) -> str:
        """How requests that ended so are counted: 4xx, 5xx."""
        return f"{self.status // 100}xx"

    def as_dict(self) -> dict[str, Any]:
        """The body that OpenAI's clients understand."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        body = json.dumps(self.as_dict(), ensure_ascii=False).encode("utf-8", "replace")
        return Response(body, self.status, self.headers, media_type="application/json")


def problem_of(error: Exception) -> Problem:
    """How an error is told to whoever asked. What is not expected is logged, and its details stay here."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ContextOverflow):
        return Problem(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, (RequestError, InvalidSetting, AdapterRefused)):
        return Problem(400, str(error))
    if isinstance(error, (EntryNotFound, ModelNotFound, AdapterNotFound)):
        return Problem(404, str(error))
    if isinstance(error, DocumentNotFound):
        advice = "GET /v1/rekindle/documents lists those there are."
        return Problem(404, f"There is no such document. {advice}", code="document_not_found")
    if isinstance(error, NothingKnown):
        advice = "Do that first: POST /v1/rekindle/documents."
        return Problem(404, f"Nothing was ingested yet. {advice}", code="nothing_known")
    if isinstance(error, KnowledgeUnusable):
        log.error("%s", error)  # it names a folder of this machine, which is nobody's business
        message = "The library cannot be used now; the log of the server tells why."
        return Problem(503, message, code="library_unusable", headers={"Retry-After": "5"})
    if isinstance(error, (OutOfMemory, Closed)):
        return Problem(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, Cancelled):
        return Problem(503, "The request was cancelled: the server is stopping, or its app was killed.")
    if isinstance(error, (ModelError, RekindleError)):
        log.error("%s", error)
        return Problem(500, str(error))
    log.exception("A request failed.", exc_info=error)
    return Problem(500, "Something went wrong in the server; its log tells what.")
