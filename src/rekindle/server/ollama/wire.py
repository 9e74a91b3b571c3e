"""How Ollama's API writes errors and streams: a line of JSON for each item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.server.errors import ApiError
from rekindle.server.protocol import WireProtocol, to_json


def _error(problem: ApiError) -> dict[str, Any]:
    if problem.overflow is None:
        return {"error": problem.message}
    return {
        "error": "the input length exceeds the context length: {} > {}. {}".format(*problem.overflow, problem.message)
    }


def _line(item: Mapping[str, Any]) -> str:
    return f"{to_json(item)}\n"


# A space before a line is still JSON; an empty line is none, and ends clients.
OLLAMA = WireProtocol("Ollama", _error, _line, ping=" ", media_type="application/x-ndjson")
