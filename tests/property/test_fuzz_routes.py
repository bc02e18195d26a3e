"""Whatever a client sends, the boundary answers: as asked, or with an error in the API's own form. Never a 500."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.proxy.app import Proxy
from clawgym_env.proxy.session import Session
from clawgym_env.rendering import ChatRenderer
from clawgym_env.types import Budget

RENDERER = ChatRenderer.from_folder()
ANSWER = RENDERER.encode_reply("ok")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
#: A whole request of each API, with everything in it that is read.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "a"},
        ],
        "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "temperature": 1,
        "top_p": 1,
        "max_tokens": 5,
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"command": "ls"}'},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "description": "d", "parameters": SCHEMA},
            {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
        ],
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "store": False,
        "temperature": 1,
        "max_output_tokens": 5,
        "stream": False,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "x"},
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]}],
            },
        ],
        "tools": [{"name": "bash", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "temperature": 1,
        "top_k": 5,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "stream": False,
    },
    "/v1beta/models/m:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "u"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "r", "thought": True},
                    {"functionCall": {"name": "bash", "args": {"command": "ls"}}, "thoughtSignature": "eA=="},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "a"}}}]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {
                        "name": "bash",
                        "description": "d",
                        "parameters": {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}},
                    }
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {
            "temperature": 1,
            "topK": 4,
            "maxOutputTokens": 5,
            "stopSequences": ["x"],
            "thinkingConfig": {"includeThoughts": True},
        },
    },
}
ROUTES = list(VALID)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
WORDS = st.sampled_from(["text", "user", "assistant", "model", "tool", "auto", "none", "any", "thinking", "image", ""])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, v in inside for p in places(v, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, Any]:
    """A route, and a valid body with one to three places changed, doubled or taken away."""
    route = draw(st.sampled_from(ROUTES))
    body = copy.deepcopy(VALID[route])
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(body)[1:] or [()]))
        if not place:
            break
        at: Any = body
        for key in place[:-1]:
            at = at[key]
        how = draw(st.sampled_from(["replace", "word", "delete", "double", "add"]))
        if how == "replace":
            at[place[-1]] = draw(JSON)
        elif how == "word":
            at[place[-1]] = draw(WORDS)
        elif how == "delete":
            del at[place[-1]]
        elif how == "double" and isinstance(at, list):
            at.insert(place[-1], copy.deepcopy(at[place[-1]]))
        elif isinstance(at, dict):
            at[draw(st.text(max_size=12))] = draw(JSON)
    return route, body


def ask(route: str, body: bytes) -> tuple[httpx.Response, Session]:
    """One request to a fresh rollout, through the whole application."""

    async def go() -> tuple[httpx.Response, Session]:
        proxy = Proxy()
        session = Session("r", ScriptedEngine(lambda *_: ANSWER), RENDERER, budget=Budget(max_calls=3))
        proxy.register(session)
        transport = httpx.ASGITransport(proxy.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://box") as http:
            response = await http.post(f"/rollout/r{route}", content=body, headers={"content-type": "application/json"})
        return response, session

    return asyncio.run(go())


def check(route: str, body: bytes) -> None:
    response, session = ask(route, body)
    assert session.in_flight == 0 and not session.failed.is_set()
    assert response.status_code in (200, 400, 413), response.text
    if response.status_code == 200:
        assert len(session.records) == 1
        return
    assert session.records == []
    answer = response.json()
    error = answer["error"]
    assert error["message"]
    if route == "/v1/messages":
        assert answer["type"] == "error" and error["type"] == "invalid_request_error"
    elif route.startswith("/v1beta"):
        assert error["code"] == 400 and error["status"] == "INVALID_ARGUMENT"
    else:
        assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("route", ROUTES)
def test_the_whole_request_is_served(route: str) -> None:
    response, session = ask(route, orjson.dumps(VALID[route]))
    assert response.status_code == 200, response.text
    assert len(session.records) == 1


@given(changed())
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_changed_request_is_served_or_refused(case: tuple[str, Any]) -> None:
    route, body = case
    check(route, json.dumps(body).encode())


def deep(levels: int) -> Any:
    """An object within an object, and so on."""
    value: Any = {"a": 1}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("levels", [100, 300, 900])
@pytest.mark.parametrize("where", ["tool", "call", "top"])
@pytest.mark.parametrize("route", ROUTES)
def test_deep_nesting_is_served_or_refused(route: str, where: str, levels: int) -> None:
    body = copy.deepcopy(VALID[route])
    if where == "top":
        body["metadata"] = deep(levels)
    else:
        text = json.dumps(body)
        old = json.dumps({"command": {"type": "string"}}) if where == "tool" else json.dumps({"command": "ls"})
        new = json.dumps(deep(levels))
        text = text.replace(old, new).replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
        body = json.loads(text)
    check(route, json.dumps(body).encode())


@given(st.sampled_from(ROUTES), st.binary(max_size=64) | JSON.map(lambda v: str(v).encode()))
@example("/v1/messages", b'{"a":' * 5000)
@example("/v1/responses", b"[" * 100_000)
@example("/v1/chat/completions", b'{"messages": "\xff"}')
@settings(max_examples=100, deadline=None)
def test_what_is_no_request_is_refused(route: str, body: bytes) -> None:
    check(route, body)
