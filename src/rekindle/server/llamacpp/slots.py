"""/props, /slots and /apply-template: what llama.cpp's clients ask about the server and its template."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.core.request import Message, Request
from rekindle.server.body import messages_of
from rekindle.server.call import Call
from rekindle.server.llamacpp.schema import ApplyTemplateRequest


async def show_props(call: Call) -> Response:
    """The model and its limits, as llama.cpp's server shows them."""
    service = call.service
    return JSONResponse(
        {
            "default_generation_settings": _slot(call, 0),
            "total_slots": service.line.places,
            "model_alias": service.model,
            "model_path": service.model,
            "chat_template": await call.template(),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"rekindle {__version__}",
        }
    )


async def list_slots(call: Call) -> Response:
    """How many requests are answered at the same time, as llama.cpp's server shows it; nobody's prompts."""
    call.require_operator()
    return JSONResponse([_slot(call, number) for number in range(call.service.line.places)])


def _slot(call: Call, number: int) -> dict[str, Any]:
    busy = call.caller.operator and number < call.service.line.running
    context = call.service.session.engine.context_tokens
    return {"id": number, "n_ctx": context, "speculative": False, "is_processing": busy, "params": {}, "prompt": ""}


async def apply_template(call: Call, body: ApplyTemplateRequest) -> Response:
    """The prompt that messages become by the model's template, its control tokens spelled out."""
    call.adapter_of(body.model)
    variables = body.chat_template_kwargs
    think = None if variables is None else variables.think
    request = Request.of(messages_of(body.messages), tools=body.tools or (), think=think)
    messages = [message for message in request.prompt if isinstance(message, Message)]
    session = call.service.session

    def applied() -> str:
        with session.staying():
            engine = session.engine
            tokens = engine.tokenizer.encode_chat(
                messages, tools=request.tools, think=think, token_limit=engine.context_tokens
            )
            return engine.tokenizer.spell(tokens)

    ignored = [
        *body.ignored(),
        *(f"chat_template_kwargs.{name}" for name in (variables.ignored() if variables else ())),
    ]
    return JSONResponse({"prompt": await call.in_thread(applied), "rekindle": {"ignored": ignored}})
