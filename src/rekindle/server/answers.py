"""What every endpoint answers, as JSON schemas: for the OpenAPI document. Tests hold replies against them.

They name what clients may rely on; a reply may have more.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_TIMINGS = _object(cache_n=_COUNT, prompt_n=_COUNT, prompt_ms=_NUMBER, predicted_n=_COUNT, predicted_ms=_NUMBER)
_REUSED = _object(
    level=_TEXT,
    loaded=_COUNT,
    loaded_from=_object(engine=_COUNT, memory=_COUNT, disk=_COUNT),
    computed=_COUNT,
    miss=_or_null(_TEXT),
    ignored=_list(_TEXT),
)
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT}
_TOLD = {"usage": _USAGE, "timings": _TIMINGS, "rekindle": _REUSED}
_MODEL = _object(id=_TEXT, object=_TEXT, created=_COUNT, owned_by=_TEXT, capabilities=_list(_TEXT))
_APP = {"id": _TEXT, "state": _TEXT, "requests": _COUNT, "seen": _NUMBER}
_RANK = _or_null({"type": "integer", "minimum": 1})
_DOCUMENT = {
    "name": _TEXT,
    "source": _TEXT,
    "title": _TEXT,
    "app": _or_null(_TEXT),
    "chunks": _COUNT,
    "characters": _COUNT,
    "added": _NUMBER,
}
_PASSAGE = {"document": _TEXT, "source": _TEXT, "title": _TEXT, "text": _TEXT, "score": _NUMBER}
_RETRIEVED = _object(how=_TEXT, ms=_NUMBER, left_out=_COUNT)
_EXPLAINED = _object(model=_TEXT, tokens=_COUNT, parts=_list(_object()), reason=_object(kind=_TEXT), text=_TEXT)

# By the name of the function that answers.
ANSWERS: dict[str, Schema] = {
    "answer_chat": _object(
        **_HEAD,
        choices=_list(_object(index=_COUNT, message=_object(role=_TEXT, content=_or_null(_TEXT)), finish_reason=_TEXT)),
        **_TOLD,
    ),
    "answer_completion": _object(
        **_HEAD, choices=_list(_object(index=_COUNT, text=_TEXT, finish_reason=_TEXT)), **_TOLD
    ),
    "answer_embeddings": _object(
        object=_TEXT,
        data=_list(_object(object=_TEXT, index=_COUNT, embedding={"anyOf": [_list(_NUMBER), _TEXT]})),
        model=_TEXT,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "answer_question": _object(
        **_HEAD,
        question=_TEXT,
        answer=_TEXT,
        sources=_list(_object(number=_COUNT, **_PASSAGE, cut=_FLAG)),
        finish_reason=_TEXT,
        usage=_USAGE,
        timings=_TIMINGS,
        rekindle={"allOf": [_REUSED, _object(retrieval=_RETRIEVED)]},
    ),
    "search_documents": _object(
        data=_list(_object(**_PASSAGE, word_rank=_RANK, meaning_rank=_RANK, chunk=_COUNT)), retrieval=_TEXT, ms=_NUMBER
    ),
    "add_documents": _object(
        data=_list(_object(**_DOCUMENT)),
        added=_COUNT,
        changed=_COUNT,
        unchanged=_COUNT,
        passages=_COUNT,
        embedded=_COUNT,
        truncated=_COUNT,
        problems=_list(_object(source=_TEXT, reason=_TEXT)),
        ms=_NUMBER,
    ),
    "list_documents": _object(data=_list(_object(**_DOCUMENT)), total=_COUNT, has_more=_FLAG),
    "show_document": _object(**_DOCUMENT, passages=_list(_object(chunk=_COUNT, text=_TEXT))),
    "forget_document": _object(forgotten=_COUNT, passages=_COUNT),
    "list_models": _object(object=_TEXT, data=_list(_MODEL)),
    "show_model": _MODEL,
    "load_adapter": _object(
        status=_TEXT, name=_TEXT, digest=_TEXT, scale=_NUMBER, rank=_COUNT, size_bytes=_COUNT, same_layers=_COUNT
    ),
    "unload_adapter": _object(status=_TEXT, name=_TEXT),
    "tokenize": _object(
        tokens=_list({"anyOf": [_COUNT, _object(id=_COUNT, piece=_TEXT)]}), count=_COUNT, max_model_len=_COUNT
    ),
    "detokenize": _object(content=_TEXT),
    "health": _object(status=_TEXT, version=_TEXT, uptime_seconds=_NUMBER),
    "metrics": _TEXT,
    "show_server": _object(model=_TEXT, engine=_TEXT, device=_TEXT, context_tokens=_COUNT, loaded=_FLAG),
    "show_stats": _object(models=_list(_object())),
    "list_entries": _object(data=_list(_object(name=_TEXT, tokens=_COUNT)), total=_COUNT, has_more=_FLAG),
    "remove_entry": _object(removed=_COUNT),
    "pin_entry": _object(pinned=_FLAG),
    "check_cache": _object(problems=_list({})),
    "warm_prompt": _object(usage=_object(prompt_tokens=_COUNT, cached_tokens=_COUNT), rekindle=_REUSED),
    "explain_prompt": _EXPLAINED,
    "explain_last": _EXPLAINED,
    "list_apps": _object(data=_list(_object(**_APP))),
    "set_app": _object(**_APP, stopped_requests=_COUNT),
}
