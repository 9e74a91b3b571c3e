"""A small agent over a library of PyPI: python sdk_agent.py PROTOCOL URL FOLDER TASK...

It runs in the clients' environment, without Rekindle. Every task is a conversation with two tools; the conversations
take turns, a request each, until all are finished. What a model says last is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KEY, MODEL, MAX_TOKENS = "sk-dummy-0000", "any-name", 400
RULES = "\n".join(
    f"Rule {number}: file {number} of the project has an owner; ask before you move it, and keep its line endings."
    for number in range(120)
)
PATH = {"type": "string", "description": "Where the file is, below the project's folder."}
TOOLS = {
    "write_file": {"path": PATH, "text": {"type": "string", "description": "All that the file shall hold."}},
    "read_file": {"path": PATH},
}
SCHEMAS = {name: {"type": "object", "properties": fields, "required": [*fields]} for name, fields in TOOLS.items()}
FUNCTIONS = [{"name": name, "description": f"{name} of the project.", "parameters": SCHEMAS[name]} for name in TOOLS]


def use(folder: Path, name: str, arguments: dict[str, str]) -> str:
    """The result of a tool."""
    path = folder / arguments["path"]
    if name == "write_file":
        path.write_text(arguments["text"], "utf-8")
        return f"{len(arguments['text'])} characters written."
    return path.read_text("utf-8")


class Conversation:
    """A conversation of one protocol; `turn` sends it, uses the tools that the model calls, and says if it goes on."""

    def __init__(self, url: str, folder: Path, system: str, task: str) -> None:
        self.folder, self.system, self.said = folder, system, ""
        self.messages: list[Any] = [{"role": "user", "content": task}]
        self.connect(url)

    def connect(self, url: str) -> None:
        raise NotImplementedError

    def turn(self) -> bool:
        raise NotImplementedError


class AnthropicConversation(Conversation):
    def connect(self, url: str) -> None:
        import anthropic

        self.client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)

    def turn(self) -> bool:
        tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        system: Any = [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}]
        with self.client.messages.stream(
            model=MODEL, max_tokens=MAX_TOKENS, system=system, messages=self.messages, tools=tools
        ) as stream:
            reply = stream.get_final_message()
        self.said = "".join(block.text for block in reply.content if block.type == "text")
        calls = [block for block in reply.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": use(self.folder, call.name, call.input)}
            for call in calls
        ]
        self.messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        assert (reply.stop_reason == "tool_use") == bool(calls), reply
        return bool(calls)


class ChatConversation(Conversation):
    def connect(self, url: str) -> None:
        import openai

        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        self.messages.insert(0, {"role": "system", "content": self.system})

    def turn(self) -> bool:
        tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
        with self.client.chat.completions.stream(model=MODEL, messages=self.messages, tools=tools) as stream:
            choice = stream.get_final_completion().choices[0]
        calls = choice.message.tool_calls or []
        self.said = choice.message.content or ""
        self.messages.append(choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in calls:
            result = use(self.folder, call.function.name, json.loads(call.function.arguments))
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert (choice.finish_reason == "tool_calls") == bool(calls), choice
        return bool(calls)


class ResponsesConversation(Conversation):
    def connect(self, url: str) -> None:
        import openai

        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def turn(self) -> bool:
        tools: Any = [{"type": "function", **function} for function in FUNCTIONS]
        with self.client.responses.stream(
            model=MODEL, instructions=self.system, input=self.messages, tools=tools
        ) as stream:
            reply = stream.get_final_response()
        assert reply.status == "completed", reply
        calls = [item for item in reply.output if item.type == "function_call"]
        self.said = reply.output_text
        self.messages += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in reply.output]
        for call in calls:
            result = use(self.folder, call.name, json.loads(call.arguments))
            self.messages.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        return bool(calls)


class OllamaConversation(Conversation):
    def connect(self, url: str) -> None:
        import ollama

        self.client = ollama.Client(url)
        self.messages.insert(0, {"role": "system", "content": self.system})

    def turn(self) -> bool:
        tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
        pieces = list(self.client.chat(MODEL, self.messages, tools=tools, stream=True))
        assert pieces[-1].done, pieces
        self.said = "".join(piece.message.content or "" for piece in pieces)
        calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
        self.messages.append({"role": "assistant", "content": self.said, "tool_calls": calls})
        for call in calls:
            result = use(self.folder, call.function.name, dict(call.function.arguments))
            self.messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
        return bool(calls)


PROTOCOLS = {
    "anthropic": AnthropicConversation,
    "openai-chat": ChatConversation,
    "openai-responses": ResponsesConversation,
    "ollama": OllamaConversation,
}


def main() -> None:
    protocol, url, folder, *tasks = sys.argv[1:]
    systems = [f"You are agent {number}.\n{RULES}" for number in range(len(tasks))]
    conversations = [
        PROTOCOLS[protocol](url, Path(folder), system, task) for system, task in zip(systems, tasks, strict=True)
    ]
    going = conversations
    while going:
        going = [conversation for conversation in going if conversation.turn()]
    print("\n".join(conversation.said for conversation in conversations))


if __name__ == "__main__":
    main()
