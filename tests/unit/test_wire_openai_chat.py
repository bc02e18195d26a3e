"""Chat Completions as JSON: what is read, what is refused by name, and one message however it is sent."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.wire import openai_chat as wire
from clawgym_env.wire.base import Reply, Usage
from tests.json_values import JSON

USER = {"role": "user", "content": "hi"}
BASH = {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> Any:
    return wire.parse_request(orjson.dumps({"model": "policy", "messages": [USER], **fields}), {})


def refusal(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def reply(message: Message, finish: Any = "stop", *, usage: bool = True) -> Reply:
    request = ChatRequest("policy", (), wants=frozenset({wire.INCLUDE_USAGE} if usage else ()))
    return Reply(1, 1_700_000_000, request, message, finish, Usage(11, 7, 3))


def test_a_whole_request_is_read() -> None:
    request = wire.parse_request(
        orjson.dumps(
            {
                "model": "policy",
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [
                            {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"x": 1}'}},
                            {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": "{broken"}},
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
                ],
                "tools": [BASH],
                "temperature": 1,
                "top_p": 0.5,
                "max_completion_tokens": 9,
                "max_tokens": 99,
                "stream": True,
                "stream_options": {"include_usage": True},
                "store": False,
                "stop": ["END", ""],
                "seed": 3,
                "top_k": 20,
            }
        ),
        {},
    )
    assert request.messages == (
        Message("system", "be brief"),
        Message("user", "a\nb"),
        Message("assistant", "", "hm", (ToolCall("bash", {"x": 1}, "c1"), ToolCall("bash", "{broken", "c2"))),
        Message("tool", "ok", tool_call_id="c1"),
    )
    assert request.tools == (ToolSpec("bash", "run", {"type": "object"}),)
    assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 0.5, 9)
    assert (request.stop, request.seed, request.top_k) == (("END",), 3, 20)
    assert request.stream and request.wants == {wire.INCLUDE_USAGE}
    assert request.extra == {"store": False}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("min_tokens", 4),
        ("never_heard_of", 0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert field in str(error)
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("presence_penalty", 0.0),
        ("response_format", {"type": "text"}),
        ("user", "u"),
        ("parallel_tool_calls", True),
        ("reasoning_effort", "low"),
        ("prompt_cache_key", "k"),
        ("never_heard_of", None),
    ],
)
def test_harmless_fields_are_recorded(field: str, value: Any) -> None:
    assert parse(**{field: value}).extra == {field: value}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "oracle", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "tool", "content": ""}]}, "messages[1].tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0].refusal"),
        ({"tools": 5}, "tools"),
        ({"tools": {"name": "bash"}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, None),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": [3]}, "stop"),
        ({"seed": "one"}, "seed"),
        ({"top_k": 0.5}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 7}, "stream_options"),
    ],
)
def test_bad_types_name_the_field(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert parse(**fields).tools[0].parameters == {}
    else:
        assert refusal(**fields).param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"text"', b"null", b'{"model": NaN}', b"\xff\xfe", b'{"a":' * 3000, b"[" * 100_000]
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        wire.parse_request(body, {})
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_images_and_the_like_are_refused(kind: str) -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]}])
    assert error.param == "messages[0].content[1]"
    assert kind in str(error)


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    """Node harnesses cut long tool output by UTF-16 units; the JSON of half an emoji is not UTF-8."""
    request = wire.parse_request(
        b'{"model": "p", "messages": [{"role": "user", "content": "cut \\ud83d, \\ud83d\\ude00"}]}', {}
    )
    assert request.messages[0].content == "cut \ufffd, \U0001f600"


def test_no_tools_may_be_chosen_or_offered() -> None:
    assert parse(tools=[BASH], tool_choice="none").tools == ()
    assert parse(tools=[BASH], tool_choice="auto").tools[0].name == "bash"
    assert parse(tools=None).tools == () and parse(tools=[]).tools == ()


MESSAGES = {
    "text": Message("assistant", "Hello."),
    "nothing": Message("assistant", ""),
    "call": Message("assistant", "", None, (ToolCall("bash", {"command": "ls -la"}, "call1x0"),)),
    "parallel": Message(
        "assistant", "Both.", None, (ToolCall("bash", {"command": "ls"}, "call1x0"), ToolCall("read", {}, "call1x1"))
    ),
    "reasoning": Message("assistant", "Yes.", "Because.", ()),
    "broken": Message("assistant", "", None, (ToolCall("bash", '{"command": "l', "call1x0"),)),
    "unicode": Message("assistant", "żółć \U0001f600 \x00\n", None, (ToolCall("ü", {"ß": ["\u2028"]}, "call1x0"),)),
}


def accumulated(events: list[bytes]) -> ChatCompletion:
    """The message that the official SDK makes of a stream."""
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
    assert events[-1] == b"data: [DONE]\n\n"
    for event in events[:-1]:
        assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
        state.handle_chunk(ChatCompletionChunk.model_validate(orjson.loads(event[6:])))
    return state.current_completion_snapshot


def tool_calls(message: Any) -> list[tuple[str, str, str]]:
    return [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", list(MESSAGES))
def test_streamed_equals_unstreamed(name: str, finish: str) -> None:
    answer = reply(MESSAGES[name], finish)
    whole = ChatCompletion.model_validate(wire.render_reply(answer))
    streamed = accumulated([*wire.stream_deltas(answer), *wire.stream_end(answer)])
    a, b = whole.choices[0], streamed.choices[0]
    assert a.finish_reason == b.finish_reason
    assert a.message.content == b.message.content
    assert getattr(a.message, "reasoning_content", None) == getattr(b.message, "reasoning_content", None)
    assert tool_calls(a.message) == tool_calls(b.message)
    assert whole.usage is not None and streamed.usage is not None
    assert whole.usage.model_dump() == streamed.usage.model_dump()
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (11, 7, 18)


@pytest.mark.parametrize(
    ("name", "finish", "on_the_wire"),
    [
        ("text", "stop", "stop"),
        ("call", "stop", "tool_calls"),
        ("call", "length", "length"),
        ("text", "length", "length"),
    ],
)
def test_a_truncated_answer_never_ends_in_tool_calls(name: str, finish: str, on_the_wire: str) -> None:
    whole = wire.render_reply(reply(MESSAGES[name], finish))
    assert whole["choices"][0]["finish_reason"] == on_the_wire


def test_usage_is_streamed_only_on_request() -> None:
    events = list(wire.stream_end(reply(MESSAGES["text"], usage=False)))
    assert len(events) == 2 and b"prompt_tokens" not in b"".join(events)


CALLS = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3), st.text(min_size=1))


@given(st.text(), st.none() | st.text(min_size=1), st.lists(CALLS, max_size=3))
def test_a_rendered_message_is_read_back_as_it_was(content: str, reasoning: str | None, calls: list[ToolCall]) -> None:
    message = Message("assistant", content, reasoning, tuple(calls))
    body = orjson.dumps({"model": "p", "messages": [wire.message_json(message)]})
    assert wire.parse_request(body, {}).messages == (message,)


def test_errors_are_in_the_apis_form() -> None:
    error = WireError("no", status=400, param="n", code="unsupported_parameter")
    body = {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "unsupported_parameter"}}
    assert wire.render_error(error) == body
    assert wire.render_error(WireError("no", status=500))["error"]["type"] == "server_error"
    full = "This model's maximum context length is 8 tokens. However, you requested 9 tokens (8 in the messages, 1 in "
    assert str(wire.overflow(ContextOverflow(8, 8))).startswith(full)
    event, done = wire.stream_error(error, None)
    assert orjson.loads(event[6:]) == body and done == b"data: [DONE]\n\n"
