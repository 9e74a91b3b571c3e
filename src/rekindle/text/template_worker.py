"""The sandboxed process that renders chat templates as transformers does: a template may come from anyone.

jinja's sandbox keeps it from the system; only a process can bound its time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from rekindle.text.sandbox_worker import serve_messages

# What rendering a template may raise.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


def main() -> None:
    """Answer the messages of the parent: a template and its variables."""
    serve_messages(_answer, _TEMPLATE_ERRORS)


def _answer(message: bytes) -> bytes:
    if not message:  # the first one: this process is ready
        return b""
    template, variables = json.loads(message)
    return _compiled(template).render(variables).encode("utf-8", errors="surrogatepass")


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training: here it is written as it is."""

    tags = {"generation"}  # noqa: RUF012  (as jinja has it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without its other attributes."""

    fromkeys: Callable[..., dict[Any, Any]] = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with `_`: they would lead out of the sandbox."""

    def __init__(*args: Any, **attributes: Any) -> None:  # as jinja's: `self` may be a name in it
        given = dict(*args[1:], **attributes)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}: names in it do not begin with '_'")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
