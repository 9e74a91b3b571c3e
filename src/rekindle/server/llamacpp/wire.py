"""How llama.cpp's server writes errors and streams."""

from __future__ import annotations

from typing import Any

from rekindle.server.errors import ApiError
from rekindle.server.protocol import WireProtocol

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
