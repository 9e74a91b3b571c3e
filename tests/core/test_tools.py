"""Tools, calls and choices: OpenAI's forms go in and come out, anything else is refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.core.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice, parse_tools
from rekindle.errors import InvalidPrompt


def form(name: object = "look", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


SCHEMA = {"properties": {"city": {"type": "string"}}, "required": ["city"], "type": "object"}


@pytest.mark.parametrize(
    "item", [form(parameters=SCHEMA), form("a-B_9", description="", parameters=SCHEMA, strict=True)]
)
def test_a_tool_comes_out_as_it_went_in(item: dict[str, Any]) -> None:
    assert json.dumps(Tool.parse(item).as_openai()) == json.dumps(item), "the order of the keys too: prompts have it"


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_tool_without_parameters_takes_an_empty_object(parameters: object) -> None:
    for item in (form(), form(parameters=parameters)):
        assert Tool.parse(item).parameters == {"type": "object", "properties": {}}


def test_a_schema_that_leaves_out_its_type_is_one_of_an_object() -> None:
    assert Tool.parse(form(parameters={"properties": {}})).parameters["type"] == "object"


def test_templates_do_not_see_strict() -> None:
    tool = Tool.parse(form(strict=True))
    assert "strict" in tool.as_openai()["function"] and "strict" not in tool.as_template_input()["function"]


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("look", "form"),
        ({"type": "web_search"}, "only functions"),
        ({"type": "function"}, "'function'"),
        (form(""), "letters, digits"),
        (form("two words"), "letters, digits"),
        (form("a" * 129), "letters, digits"),
        (form("line\n"), "letters, digits"),
        (form(5), "letters, digits"),
        (form(description=["a"]), "description"),
        (form(strict="yes"), "strict"),
        (form(parameters=[]), "schema of an object"),
        (form(parameters="object"), "schema of an object"),
        (form(parameters={"type": "string"}), "schema of an object"),
        (form(parameters={"type": ["object", "null"]}), "schema of an object"),
        (form(parameters={"type": "object", "properties": ["city"]}), "properties"),
        (form(parameters={"type": "object", "default": float("nan")}), "JSON"),
        (form(parameters={"type": "object", "default": object()}), "JSON"),
        (form(description="half \ud83d"), "Unicode"),
    ],
)
def test_what_is_no_tool_is_refused_with_a_sentence(item: object, sentence: str) -> None:
    with pytest.raises(InvalidPrompt, match=sentence):
        Tool.parse(item)


def test_a_list_of_tools_is_checked_as_a_whole() -> None:
    assert parse_tools(None) == () == parse_tools([])
    assert [tool.name for tool in parse_tools([form("a"), form("b")])] == ["a", "b"]
    assert len(parse_tools([form(f"t{i}") for i in range(MAX_TOOLS)])) == MAX_TOOLS
    with pytest.raises(InvalidPrompt, match=f"at most {MAX_TOOLS}"):
        parse_tools([form(f"t{i}") for i in range(MAX_TOOLS + 1)])
    with pytest.raises(InvalidPrompt, match="Two tools are named 'a'"):
        parse_tools([form("a"), form("b"), form("a")])
    for wrong in (form("a"), "a", 3):
        with pytest.raises(InvalidPrompt, match="list"):
            parse_tools(wrong)


def test_a_call_has_its_arguments_as_text_for_people_and_as_an_object_for_templates() -> None:
    item = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
    call = ToolCall.parse(item)
    assert call.as_openai() == item
    assert call.as_template_input()["function"] == {"name": "look", "arguments": {"city": "Oslo"}}
    already = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
    assert ToolCall.parse(already) == call


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '{"a": NaN}', r'{"a": "\ud83d"}', "[" * 100_000])
def test_arguments_that_are_no_object_stay_the_text_they_are(arguments: str) -> None:
    call = ToolCall.parse({"id": "1", "function": {"name": "look", "arguments": arguments}})
    assert call.as_template_input()["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("look", "'function'"),
        ({"id": "1"}, "'function'"),
        ({"function": {"arguments": "{}"}}, "no name"),
        ({"function": {"name": ""}}, "no name"),
        ({"id": 5, "function": {"name": "look"}}, "id of the call"),
        ({"id": "1", "function": {"name": "look", "arguments": 5}}, "arguments"),
        ({"id": "1", "function": {"name": "look", "arguments": {"a": {1}}}}, "JSON"),
        ({"id": "1", "function": {"name": "look", "arguments": '"\ud83d"'}}, "Unicode"),
    ],
)
def test_what_is_no_call_is_refused_with_a_sentence(item: object, sentence: str) -> None:
    with pytest.raises(InvalidPrompt, match=sentence):
        ToolCall.parse(item)


TOOLS = (Tool("look"), Tool("listen"))


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (form("look"), ToolChoice("function", "look")),
    ],
)
def test_a_choice_is_understood(value: object, choice: ToolChoice) -> None:
    assert ToolChoice.parse(value, TOOLS) == choice
    assert choice.forces == (choice.mode in ("required", "function"))


@pytest.mark.parametrize("value", [None, "auto", "none"])
def test_without_tools_nothing_can_be_called(value: object) -> None:
    assert ToolChoice.parse(value, ()) == ToolChoice("none")


@pytest.mark.parametrize(
    ("value", "tools", "sentence"),
    [
        ("required", (), "no tools"),
        ("requird", TOOLS, "Did you mean 'required'"),
        (form("lok"), TOOLS, "Did you mean 'look'"),
        (form("look"), (), "no tools"),
        ({"type": "allowed_tools"}, TOOLS, "'allowed_tools' needs"),
        ({"type": "function"}, TOOLS, "'tool_choice' is"),
        (5, TOOLS, "'tool_choice' is"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(value: object, tools: tuple[Tool, ...], sentence: str) -> None:
    with pytest.raises(InvalidPrompt, match=sentence):
        ToolChoice.parse(value, tools)
