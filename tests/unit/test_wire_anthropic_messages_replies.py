"""Anthropic Messages as JSON: one message however it is sent, and what is said of errors."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import Message, ToolCall
from clawgym_env.wire import anthropic_messages as wire
from clawgym_env.wire.base import RAW_ARGUMENTS, Reply
from tests.json_values import JSON
from tests.wires.anthropic_messages import USER, Json, parse, read, reply, text, use

MESSAGES = {
    "text": Message("assistant", "Hello."),
    "nothing": Message("assistant", ""),
    "call": Message("assistant", "", None, (ToolCall("bash", {"command": "ls -la"}, "call7x0"),)),
    "no arguments": Message("assistant", "", None, (ToolCall("bash", {}, "call7x0"),)),
    "parallel": Message(
        "assistant", "Both.", "Two.", (ToolCall("bash", {"command": "ls"}, "call7x0"), ToolCall("read", {}, "call7x1"))
    ),
    "reasoning": Message("assistant", "Yes.", "Because.\n"),
    "only reasoning": Message("assistant", "", "Because."),
    "broken": Message("assistant", "", None, (ToolCall("bash", '{"command": "l', "call7x0"),)),
    "unicode": Message("assistant", "żółć \U0001f600 \x00\n", "ß\u2028", (ToolCall("ü", {"ß": ["\u2028", 1.5]}, "c"),)),
}
SIGNED_TWO = base64.urlsafe_b64encode(b"clawgym1:thinking:Two.").decode()


def test_an_answer_has_the_apis_form() -> None:
    assert wire.render_reply(reply(MESSAGES["parallel"])) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Two.", "signature": SIGNED_TWO},
            {"type": "text", "text": "Both."},
            {"type": "tool_use", "id": "call7x0", "name": "bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "call7x1", "name": "read", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 5,
        },
    }


def decoded(event: bytes) -> Json:
    """The data of one event, whose name must be its type."""
    name, data, *rest = event.split(b"\n")
    assert rest == [b"", b""] and data.startswith(b"data: ")
    payload: Json = orjson.loads(data[6:])
    assert name == b"event: " + payload["type"].encode()
    return payload


def test_a_streamed_answer_has_the_apis_events() -> None:
    answer = reply(MESSAGES["parallel"])
    usage = {"input_tokens": 8, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    start: Json = {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": {**usage, "output_tokens": 0},
    }

    def block(index: int, opening: Json, *deltas: Json) -> list[Json]:
        return [
            {"type": "content_block_start", "index": index, "content_block": opening},
            *({"type": "content_block_delta", "index": index, "delta": d} for d in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    assert [decoded(e) for e in wire.stream_deltas(answer)] == [
        {"type": "message_start", "message": start},
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "Two."},
            {"type": "signature_delta", "signature": SIGNED_TWO},
        ),
        *block(1, text(""), {"type": "text_delta", "text": "Both."}),
        *block(2, use("call7x0"), {"type": "input_json_delta", "partial_json": '{"command":"ls"}'}),
        *block(3, use("call7x1", "read"), {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    assert [decoded(e) for e in wire.stream_end(answer)] == [
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None},
            "usage": {**usage, "output_tokens": 5},
        },
        {"type": "message_stop"},
    ]
    assert wire.stream_type(answer.request) == b"text/event-stream"


def client(body: bytes, kind: str) -> anthropic.Anthropic:
    """The official client, before a transport that answers every request with one body."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=body, headers={"content-type": kind})

    http = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(answer))
    return anthropic.Anthropic(api_key="x", base_url="http://test.invalid", max_retries=0, http_client=http)


ASK: Any = {"model": "policy", "max_tokens": 64, "messages": [USER]}


def whole_and_streamed(answer: Reply) -> tuple[Json, Json]:
    with client(orjson.dumps(wire.render_reply(answer)), "application/json") as sdk:
        whole = sdk.messages.create(**ASK).to_dict()
    ping = wire.keep_alive(answer.request)
    events = b"".join([ping, ping, *wire.stream_deltas(answer), ping, *wire.stream_end(answer)])
    with client(events, "text/event-stream") as sdk, sdk.messages.stream(**ASK) as stream:
        return whole, stream.get_final_message().to_dict()


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", list(MESSAGES))
def test_streamed_equals_unstreamed(name: str, finish: str) -> None:
    whole, streamed = whole_and_streamed(reply(MESSAGES[name], finish))
    assert whole == streamed
    assert whole["content"], "clients index the first block"
    back = read({"role": "assistant", "content": whole["content"]})
    assert back == (MESSAGES[name],)


def test_an_empty_answer_has_one_empty_text_block() -> None:
    assert wire.render_reply(reply(MESSAGES["nothing"]))["content"] == [text("")]
    kinds = [decoded(e)["type"] for e in wire.stream_deltas(reply(MESSAGES["nothing"]))]
    assert kinds == ["message_start", "content_block_start", "content_block_stop"]
    assert [b["type"] for b in wire.render_reply(reply(MESSAGES["only reasoning"]))["content"]] == ["thinking", "text"]
    assert [b["type"] for b in wire.render_reply(reply(MESSAGES["call"]))["content"]] == ["tool_use"]


def test_arguments_that_are_no_object_are_one_that_no_tool_takes() -> None:
    (block,) = wire.render_reply(reply(MESSAGES["broken"]))["content"]
    assert block["input"] == {RAW_ARGUMENTS: '{"command": "l'}


@pytest.mark.parametrize(
    ("name", "finish", "stop_text", "on_the_wire"),
    [
        ("text", "stop", None, "end_turn"),
        ("nothing", "stop", None, "end_turn"),
        ("call", "stop", None, "tool_use"),
        ("call", "length", None, "max_tokens"),
        ("text", "length", None, "max_tokens"),
        ("text", "stop", "END", "stop_sequence"),
        ("call", "stop", "END", "tool_use"),
    ],
)
def test_stop_reasons(name: str, finish: str, stop_text: str | None, on_the_wire: str) -> None:
    answer = reply(MESSAGES[name], finish, stop_text)
    named = "END" if on_the_wire == "stop_sequence" else None
    expected = {"stop_reason": on_the_wire, "stop_sequence": named, "stop_details": None}
    assert {k: wire.render_reply(answer)[k] for k in expected} == expected
    assert decoded(next(iter(wire.stream_end(answer))))["delta"] == expected


def thinking(**block: Any) -> str | None:
    return read({"role": "assistant", "content": [{"type": "thinking", **block}, text("So.")]})[0].reasoning


def test_an_emptied_thinking_block_is_read_from_its_signature() -> None:
    block = wire.render_reply(reply(MESSAGES["unicode"]))["content"][0]
    assert thinking(**{**block, "thinking": ""}) == "ß\u2028"
    assert thinking(signature=block["signature"]) == "ß\u2028"
    assert thinking(**{**block, "thinking": "edited"}) == "edited", "what the client shows is what counts"


@pytest.mark.parametrize(
    "signature",
    ["", "SIG", "EqQBCkYIARgCIkBPZ", "żółć", base64.urlsafe_b64encode(b"someone else's").decode(), "not base64!",
     base64.urlsafe_b64encode(b"clawgym2:thinking:Two.").decode(), SIGNED_TWO[:-3],
     base64.urlsafe_b64encode(b"clawgym1:thinking:\xff").decode()],
)  # fmt: skip
def test_foreign_signatures_are_ignored(signature: str) -> None:
    assert thinking(thinking="", signature=signature) is None
    assert thinking(thinking="t", signature=signature) == "t"


def test_redacted_thinking_is_dropped() -> None:
    content = [{"type": "redacted_thinking", "data": "xyz"}, text("So.")]
    assert read({"role": "assistant", "content": content}) == (Message("assistant", "So."),)


OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)
CALLS = st.builds(ToolCall, st.text(min_size=1), OBJECTS | st.text(), st.text(min_size=1))


@given(st.text(), st.none() | st.text(min_size=1), st.lists(CALLS, max_size=3), st.booleans())
def test_a_rendered_message_is_read_back_as_it_was(
    content: str, reasoning: str | None, calls: list[ToolCall], emptied: bool
) -> None:
    assume(not any(isinstance(c.arguments, dict) and RAW_ARGUMENTS in c.arguments for c in calls))
    message = Message("assistant", content, reasoning, tuple(calls))
    blocks = orjson.loads(orjson.dumps(wire.render_reply(reply(message))["content"]))
    if emptied and reasoning is not None:
        blocks[0]["thinking"] = ""
    assert read({"role": "assistant", "content": blocks}) == (message,)


@given(st.text(), st.none() | st.text(min_size=1), st.lists(CALLS, max_size=3))
def test_the_events_add_up_to_the_unstreamed_content(
    content: str, reasoning: str | None, calls: list[ToolCall]
) -> None:
    answer = reply(Message("assistant", content, reasoning, tuple(calls)))
    blocks: list[Json] = []
    for event in map(decoded, list(wire.stream_deltas(answer))[1:]):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            ((key, value),) = delta.items()
            assert kind == {"partial_json": "input_json"}.get(key, key) + "_delta"
            blocks[-1].update({"input": orjson.loads(value)} if key == "partial_json" else {key: value})
    assert blocks == wire.render_reply(answer)["content"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_are_in_the_apis_form(status: int, kind: str) -> None:
    error = WireError("no", status=status)
    body = {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": None}
    assert wire.render_error(error) == body
    (event,) = wire.stream_error(error, None)
    assert decoded(event) == body


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        ("cannot be taken", "messages[3].content[0]", "messages.3.content.0: cannot be taken"),
        ("cannot be taken", "tools[1].type", "tools.1.type: cannot be taken"),
        ("tools[1].name must be given", "tools[1].name", "tools[1].name must be given"),
        ("max_tokens: Field required", "max_tokens", "max_tokens: Field required"),
        ("no field is at fault", None, "no field is at fault"),
    ],
)
def test_errors_say_where(message: str, param: str | None, shown: str) -> None:
    assert wire.render_error(WireError(message, param=param))["error"]["message"] == shown


def test_an_errors_code_is_where_the_sdk_looks_for_it() -> None:
    body = wire.render_error(WireError("used up", code="rollout_budget_exhausted"))
    assert body["error"]["details"] == {"error_code": "rollout_budget_exhausted"}


def raised(act: Callable[[anthropic.Anthropic], object], body: bytes) -> anthropic.APIStatusError:
    with client(body, "text/event-stream") as sdk, pytest.raises(anthropic.APIStatusError) as caught:
        act(sdk)
    return caught.value


def test_an_error_in_a_stream_is_raised_by_the_sdk() -> None:
    events = b"".join(wire.stream_error(WireError("engine gone", status=500, code="engine_error"), None))
    error = raised(lambda sdk: list(sdk.messages.create(**ASK, stream=True)), wire.keep_alive(parse()) + events)
    assert (error.type, error.api_message, error.error_code) == ("api_error", "engine gone", "engine_error")


def test_a_prompt_past_the_context_is_said_exactly_as_the_api_says_it() -> None:
    error = wire.overflow(ContextOverflow(5000, 4096))
    assert (error.status, error.param) == (400, None)
    assert wire.render_error(error)["error"]["message"] == "prompt is too long: 5000 tokens > 4095 maximum"
    assert wire.render_error(error)["error"]["type"] == "invalid_request_error"
    assert str(wire.overflow(ContextOverflow(4096, 4096))) == "prompt is too long: 4096 tokens > 4095 maximum"
    assert not wire.IN_STREAM
