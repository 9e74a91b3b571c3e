"""Errors of the API: a status, a sentence, and what each exception becomes. Protocols write them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from rekindle.errors import (
    AdapterNotFound,
    AdapterRefused,
    Cancelled,
    Closed,
    ContextOverflow,
    DocumentNotFound,
    EntryNotFound,
    InvalidSetting,
    KnowledgeError,
    KnowledgeUnusable,
    LibraryFull,
    ModelError,
    ModelNotFound,
    NothingKnown,
    OutOfMemory,
    PinRefused,
    RekindleError,
    RequestError,
)
from rekindle.server.server_log import current_record

log = logging.getLogger("rekindle.server")
_PATH = re.compile(r"(?<![\w./:])/(?!v1/)[\w.~-]|\b[A-Za-z]:\\")
_MAX_MESSAGE_CHARACTERS = 2000  # of which the first and the last half are shown of a longer one


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        """`overflow`: the tokens of a prompt that does not fit, and those of the context."""
        if len(message) > _MAX_MESSAGE_CHARACTERS:  # what a request gave can be megabytes long
            half = _MAX_MESSAGE_CHARACTERS // 2
            message = f"{message[:half]} [...] {message[-half:]}"
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.overflow = overflow

    @property
    def outcome(self) -> str:
        """The label in metrics: 4xx, 5xx."""
        return f"{self.status // 100}xx"


def api_error_of(error: Exception, prompt_field: str = "messages") -> ApiError:
    """The API error for an exception. An unexpected one is logged, and its details are not sent.

    Only operators get paths of this machine. `prompt_field` is what the request calls its prompt.
    """
    if isinstance(error, ApiError):
        return error
    problem = _problem_of(error, prompt_field)
    if isinstance(error, RequestError) or current_record().operator or not _PATH.search(problem.message):
        return problem  # a request's own words may look like a path
    if problem.status < 500:  # the others are in the log already
        log.error("%s", error)
    message = "The server cannot do this: its log says why. Ask the person who runs it."
    return ApiError(problem.status, message, code=problem.code, headers=problem.headers)


def _problem_of(error: Exception, prompt_field: str) -> ApiError:
    if isinstance(error, ContextOverflow):
        numbers = (error.prompt_tokens, error.context_tokens)
        return ApiError(400, str(error), code="context_length_exceeded", param=prompt_field, overflow=numbers)
    if isinstance(error, (RequestError, InvalidSetting, AdapterRefused)):
        return ApiError(400, str(error))
    if isinstance(error, (EntryNotFound, ModelNotFound, AdapterNotFound)):
        return ApiError(404, str(error))
    if isinstance(error, PinRefused):
        return ApiError(409, str(error), code="pins_full")
    if isinstance(error, KnowledgeError):
        return _knowledge_problem(error)
    if isinstance(error, (OutOfMemory, Closed)):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, Cancelled):
        return ApiError(503, "The request was cancelled: the server is stopping, or its app was killed.")
    if isinstance(error, (ModelError, RekindleError)):
        log.error("%s", error)
        return ApiError(500, str(error))
    log.exception("A request failed.", exc_info=error)
    return ApiError(500, "Something went wrong in the server; its log tells what.")


def _knowledge_problem(error: KnowledgeError) -> ApiError:
    if isinstance(error, DocumentNotFound):
        advice = "GET /v1/rekindle/documents lists those there are."
        return ApiError(404, f"There is no such document. {advice}", code="document_not_found")
    if isinstance(error, NothingKnown):
        advice = "Do that first: POST /v1/rekindle/documents."
        return ApiError(404, f"Nothing was ingested yet. {advice}", code="nothing_known")
    if isinstance(error, LibraryFull):
        log.error("%s", error)  # it names a folder of this machine, so clients get another sentence
        message = "The library is full: there is no room for more documents. Forget some, or ask who runs the server."
        return ApiError(507, message, code="library_full")
    log.error("%s", error)
    if isinstance(error, KnowledgeUnusable):
        message = "The library cannot be used now; the log of the server tells why."
        return ApiError(503, message, code="library_unusable", headers={"Retry-After": "5"})
    return ApiError(500, str(error))
