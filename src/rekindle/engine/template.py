"""Chat templates, rendered as transformers and llama.cpp do: sandboxed, with the few functions that templates know."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from rekindle.engine.chat import Render
from rekindle.errors import InvalidPrompt

# What a template may do to whoever renders it.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


def renderer(template: str, bos: str, eos: str) -> Render:
    """What renders messages with a template, up to where the reply begins."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        compiled: jinja2.Template | jinja2.TemplateError = environment.from_string(template)
    except jinja2.TemplateError as error:
        compiled = error

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        offered = {"tools": tools} if tools else {}
        try:
            if isinstance(compiled, jinja2.TemplateError):
                raise compiled
            known = {"add_generation_prompt": True, "bos_token": bos, "eos_token": eos}
            return compiled.render(messages=messages, **offered, **known)
        except TEMPLATE_ERRORS as error:
            raise InvalidPrompt(f"The model's chat template refuses these messages: {error}") from error

    return render


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
