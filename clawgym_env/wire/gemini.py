"""Gemini's generateContent: JSON <-> types, streamed and not. See :mod:`clawgym_env.wire.base` for the invariants.

What contents say, and how ids and reasoning survive clients that drop them: :mod:`clawgym_env.wire.gemini_contents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, ToolSpec
from clawgym_env.wire import base
from clawgym_env.wire.base import Memo, Reply, Usage
from clawgym_env.wire.gemini_contents import as_object, camel, read_contents, read_system, render_parts
from clawgym_env.wire.sse import data_event

IN_STREAM: frozenset[str] = frozenset()
#: What a request may want: thoughts as parts of their own; a stream of events rather than one growing JSON array.
THOUGHTS = "thoughts"
EVENTS = "sse"

_READ = frozenset({"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"})
_HARMLESS = frozenset({"model", "safetySettings", "labels", "serviceTier", "store"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"cachedContent": ("",), "continuationToken": ("",)}
_CONFIG_READ = frozenset({"temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "thinkingConfig"})
_CONFIG_HARMLESS = frozenset({"mediaResolution", "enableEnhancedCivicAnswers"})
#: Fields that are refused unless they hold the value that asks for nothing.
_CONFIG_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "candidateCount": (1,),
    "responseMimeType": ("", "text/plain"),
    "responseModalities": ([], ["TEXT"]),
    "presencePenalty": (0,),
    "frequencyPenalty": (0,),
    "responseLogprobs": (False,),
    "logprobs": (0,),
}


def parse_request(body: bytes, params: Mapping[str, str], memo: Memo | None = None) -> ChatRequest:
    """Reads a request; see :class:`clawgym_env.wire.base.Wire`.

    Args:
        params: ``model`` and ``method`` from the path, ``alt`` from the query.
    """
    request = _request(base.load_object(body, "contents"), params, memo or Memo())
    if request.messages[-1].role == "assistant":
        raise WireError(
            "Please ensure that multiturn requests ends with a user role or a function response.", param="contents"
        )
    return request


def parse_count_request(body: bytes, params: Mapping[str, str]) -> ChatRequest:
    """Reads a request whose prompt is to be counted: its fields, or all of it under ``generateContentRequest``."""
    data = camel(base.load_object(body, "contents"))
    whole = base.optional(data, "generateContentRequest", dict)
    return _request(data if whole is None else whole, params, Memo())


def _request(body: Mapping[str, Any], params: Mapping[str, str], memo: Memo) -> ChatRequest:
    data = camel(body)
    config = as_object(data.get("generationConfig") or {}, "generationConfig")
    where = "generationConfig."
    thinking = as_object(config.get("thinkingConfig") or {}, f"{where}thinkingConfig")
    extra = {
        **base.check_fields(data, read=_READ, harmless=_HARMLESS, neutral=_NEUTRAL),
        **base.check_fields(config, read=_CONFIG_READ, harmless=_CONFIG_HARMLESS, neutral=_CONFIG_NEUTRAL, where=where),
        **base.check_fields(
            thinking,
            read={"includeThoughts"},
            harmless={"thinkingBudget", "thinkingLevel"},
            neutral={},
            where=f"{where}thinkingConfig.",
        ),
    }
    wants = set()
    if base.optional(thinking, "includeThoughts", bool, f"{where}thinkingConfig."):
        wants.add(THOUGHTS)
    if _as_events(params.get("alt", "")):
        wants.add(EVENTS)
    top_k = base.number(config, "topK", 0, 1 << 31, where)
    return ChatRequest(
        model=params["model"].removeprefix("models/"),
        messages=(*read_system(data.get("systemInstruction")), *read_contents(data.get("contents"), memo)),
        tools=_tools(data),
        temperature=base.number(config, "temperature", 0.0, 2.0, where),
        top_p=base.number(config, "topP", 0.0, 1.0, where),
        max_tokens=base.integer(config, "maxOutputTokens", where=where),
        top_k=None if top_k is None else int(top_k),
        seed=base.integer(config, "seed", low=-(1 << 63), where=where),
        stop=base.strings(config, "stopSequences", where),
        stream=params.get("method") == "streamGenerateContent",
        wants=frozenset(wants),
        extra=extra,
    )


def _as_events(alt: str) -> bool:
    if alt not in ("", "json", "sse"):
        raise WireError("only alt=sse and alt=json can be honoured", param="alt")
    return alt == "sse"


def render_reply(reply: Reply) -> dict[str, Any]:
    """The unstreamed response body."""
    return _response(reply, _parts(reply), ends=True)


def stream_type(request: ChatRequest) -> bytes:
    """Server-sent events, or one JSON array."""
    return b"text/event-stream" if EVENTS in request.wants else b"application/json"


def keep_alive(request: ChatRequest) -> bytes:
    """An empty line, whichever form the stream has: the official Python client takes a comment for a broken event."""
    return b"\n"


def stream_deltas(reply: Reply) -> Iterator[bytes]:
    """One chunk for each part but the last.

    The last goes with what ends the stream: clients drop a turn from their history when a chunk of it has no content.
    """
    for i, part in enumerate(_parts(reply)[:-1]):
        yield _element(reply.request, _response(reply, [part], ends=False), first=i == 0)


def stream_end(reply: Reply) -> Iterator[bytes]:
    """The terminal chunk; the call must be committed before it is sent."""
    *before, last = _parts(reply)
    yield _element(reply.request, _response(reply, [last], ends=True), first=not before)
    if EVENTS not in reply.request.wants:
        yield b"]"


def render_error(error: WireError) -> dict[str, Any]:
    """The API's error body."""
    message = str(error)
    body: dict[str, Any] = {"code": error.status, "message": message, "status": _status(error.status)}
    if error.param is not None:
        if error.param not in message:
            body["message"] = f"{error.param}: {message}"
        violation = {"field": error.param, "description": message}
        body["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}]
    return {"error": body}


def stream_error(error: WireError, request: ChatRequest | None, sent: Reply | None = None) -> Iterator[bytes]:
    """How an error ends a stream whose headers have gone out: as its last element."""
    if request is None or EVENTS in request.wants:
        yield data_event(render_error(error))
    else:
        yield _element(request, render_error(error), first=sent is None or len(_parts(sent)) == 1) + b"]"


def overflow(error: ContextOverflow) -> WireError:
    """The refusal that makes harnesses compact."""
    return WireError(
        f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
        f"({error.max_prompt}).",
        code="context_length_exceeded",
    )


def render_token_count(tokens: int) -> dict[str, Any]:
    """The answer to a count request."""
    return {"totalTokens": tokens}


def render_model(name: str, max_context: int) -> dict[str, Any]:
    """The body of ``GET /v1beta/models/<name>``.

    Args:
        max_context: Its context in tokens.
    """
    name = name.removeprefix("models/")
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "inputTokenLimit": max_context,
        "outputTokenLimit": max_context,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _parts(reply: Reply) -> list[dict[str, Any]]:
    return render_parts(reply.message, thoughts=THOUGHTS in reply.request.wants)


def _response(reply: Reply, parts: list[dict[str, Any]], *, ends: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    body: dict[str, Any] = {"candidates": [candidate]}
    if ends:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
        body["usageMetadata"] = _usage_json(reply.usage)
    return {**body, "modelVersion": reply.request.model, "responseId": f"resp_{reply.number}"}


def _usage_json(usage: Usage) -> dict[str, int]:
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    return counts | ({"cachedContentTokenCount": usage.cached_tokens} if usage.cached_tokens else {})


def _element(request: ChatRequest, payload: dict[str, Any], *, first: bool) -> bytes:
    if EVENTS in request.wants:
        return data_event(payload)
    return (b"[" if first else b"\n,\n") + orjson.dumps(payload)


_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def _status(code: int) -> str:
    return _STATUSES.get(code, "INVALID_ARGUMENT" if code < 500 else "INTERNAL")


def _tools(data: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """The tools that the model is offered.

    ``VALIDATED`` is as good as ``AUTO`` here: the API says of it too that the model may answer in text; what it adds is
    that calls fit their schemas, which harnesses check themselves.
    """
    tools = []
    for i, tool in enumerate(base.optional(data, "tools", list) or []):
        fields = as_object(tool, f"tools[{i}]")
        base.check_fields(fields, read={"functionDeclarations"}, harmless=(), neutral={}, where=f"tools[{i}].")
        declared = base.optional(fields, "functionDeclarations", list, f"tools[{i}].") or []
        tools += [_tool(d, f"tools[{i}].functionDeclarations[{j}]") for j, d in enumerate(declared)]
    where = "toolConfig"
    config = as_object(data.get(where) or {}, where)
    neutral = {"includeServerSideToolInvocations": (False,)}
    base.check_fields(
        config, read={"functionCallingConfig"}, harmless={"retrievalConfig"}, neutral=neutral, where=f"{where}."
    )
    where = "toolConfig.functionCallingConfig"
    calling = as_object(config.get("functionCallingConfig") or {}, where)
    base.check_fields(calling, read={"mode"}, harmless=(), neutral={"allowedFunctionNames": ([],)}, where=f"{where}.")
    mode = calling.get("mode") or "AUTO"
    if mode not in ("AUTO", "MODE_UNSPECIFIED", "VALIDATED", "NONE"):
        raise WireError("only the modes AUTO, VALIDATED and NONE can be honoured", param=f"{where}.mode")
    return () if mode == "NONE" else tuple(tools)


def _tool(data: Any, where: str) -> ToolSpec:
    tool = as_object(data, where)
    read = {"name", "description", "parameters", "parametersJsonSchema"}
    harmless = {"behavior", "response", "responseJsonSchema"}
    base.check_fields(tool, read=read, harmless=harmless, neutral={}, where=f"{where}.")
    parameters = tool.get("parametersJsonSchema")
    if parameters is None:
        parameters = _json_schema(tool.get("parameters"))
    return ToolSpec(
        base.expect(tool, "name", str, f"{where}."),
        base.optional(tool, "description", str, f"{where}.") or "",
        base.schema(parameters, f"{where}.parameters"),
    )


_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})


def _json_schema(data: Any) -> Any:
    """JSON schema of the API's subset of OpenAPI's schemas.

    Types are written in lower case and ``nullable`` becomes a type of its own, so that a tool is the same on each wire.
    """
    if not isinstance(data, dict):
        return data
    schema = camel(data)
    nullable = schema.pop("nullable", False)
    if schema.get("type") == "TYPE_UNSPECIFIED":
        del schema["type"]
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            schema[key] = value.lower()
        elif key in ("properties", "defs") and isinstance(value, dict):
            schema[key] = {name: _json_schema(of) for name, of in value.items()}
        elif key == "anyOf" and isinstance(value, list):
            schema[key] = [_json_schema(of) for of in value]
        elif key in ("items", "additionalProperties"):
            schema[key] = _json_schema(value)
        elif key in _COUNTS and isinstance(value, str) and value.isdecimal():
            schema[key] = int(value)  # a 64-bit number, which protobuf's JSON form writes as text
    if nullable is True and isinstance(schema.get("anyOf"), list):
        schema["anyOf"].append({"type": "null"})
    elif nullable is True and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    return schema
