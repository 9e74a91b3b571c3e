"""The form that a reply must have, whatever the client calls it: one grammar of the names in `FormBody`."""

from __future__ import annotations

import json
from typing import Any

from rekindle.core.grammar import Grammar
from rekindle.server.errors import ApiError
from rekindle.server.schema import FormBody, ResponseFormat, StructuredOutputs


def grammar_of(body: FormBody, field: str = "", form: ResponseFormat | None = None) -> Grammar | None:
    """What the reply must follow; None if anything goes. `form` is the format at the protocol's own `field`.

    Raises `ApiError` 400 for two forms, and for one that cannot be enforced, and `InvalidGrammar`.
    """
    guided = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
        "whitespace_pattern": body.guided_whitespace_pattern,
    }
    given = {
        field: _format(form, field),
        "response_format": _format(body.response_format, "response_format"),
        "grammar": Grammar.gbnf(body.grammar) if body.grammar else None,
        "json_schema": None if body.json_schema is None else Grammar.json_schema(body.json_schema),
        "structured_outputs": _structured("structured_outputs.", body.structured_outputs),
        "guided": _structured("guided_", StructuredOutputs.model_validate(guided)),
    }
    found = {name: grammar for name, grammar in given.items() if grammar is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise ApiError(400, f"A reply has one form: give either {first} or {second}.", param=second)
    return next(iter(found.values()), None)


def _format(form: ResponseFormat | None, field: str) -> Grammar | None:
    """The grammar of a format; None for text."""
    if form is None or form.type == "text":
        return None
    schema = form.body if form.json_schema is None else form.json_schema.body
    if schema is None and form.type == "json_schema":
        place = f"{field}.{'json_schema' if field == 'response_format' else 'schema'}"
        raise ApiError(400, f"{field}: the type json_schema needs a schema. Send it as {place}.", param=place)
    return Grammar.json_object() if schema is None else Grammar.json_schema(schema)


def _structured(prefix: str, given: StructuredOutputs | None) -> Grammar | None:
    """The grammar of vLLM's fields. An unknown one that is not empty might be the form, so it is refused."""
    if given is None:
        return None
    for name, value in (given.model_extra or {}).items():
        if value not in (None, False, ""):
            advice = "Use json, regex, choice, grammar or json_object."
            raise ApiError(400, f"{prefix}{name} cannot be obeyed here. {advice}", param=f"{prefix}{name}")
    found = [
        None if given.body is None else Grammar.json_schema(_schema(given.body, f"{prefix}json")),
        None if given.regex is None else Grammar.regex(given.regex),
        None if given.choice is None else _choice(given.choice),
        None if given.grammar is None else _rules(given.grammar),
        Grammar.json_object() if given.json_object else None,
    ]
    ways = [grammar for grammar in found if grammar is not None]
    if len(ways) > 1:
        raise ApiError(400, f"{prefix}...: a reply has one form. Give one field, not {len(ways)}.", param=prefix[:-1])
    return ways[0] if ways else None


def _schema(given: str | dict[str, Any], field: str) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        raise ApiError(400, f"{field} is not JSON. Send the schema as an object.", param=field) from None


def _choice(texts: list[str]) -> Grammar:
    """One of the texts. As one terminal, because one text may be the beginning of another."""
    return Grammar.lark(
        f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}\n"
    )


def _rules(text: str) -> Grammar:
    """vLLM takes two syntaxes: rules of GBNF have `::=`, those of Lark have not."""
    return Grammar.gbnf(text) if "::=" in text else Grammar.lark(text)
