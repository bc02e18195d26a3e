"""Anthropic Messages as JSON: what is read, what is refused by name, and one message however it is sent."""

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
from clawgym_env.types import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.wire import anthropic_messages as wire
from clawgym_env.wire.base import RAW_ARGUMENTS, Reply, Usage
from tests.json_values import JSON

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
CACHE: Json = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH: Json = {"name": "bash", "description": "run", "input_schema": SCHEMA}


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def result(call_id: str, content: Any = "ok", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def use(call_id: str, name: str = "bash", **arguments: Any) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "policy", "max_tokens": 64, "messages": [USER], **fields}
    return wire.parse_request(orjson.dumps(body), {})


def read(*messages: Json) -> tuple[Message, ...]:
    """Messages of a conversation, without the user message that a request must end with."""
    return parse(messages=[*messages, USER]).messages[:-1]


def refusal(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def reply(message: Message, finish: Any = "stop", stop_text: str | None = None) -> Reply:
    return Reply(7, 1_700_000_000, parse(), message, finish, Usage(11, 5, 3), stop_text)


def test_a_whole_request_is_read() -> None:
    request = parse(
        system=[text("You are an agent.", **CACHE), text("Be brief.")],
        messages=[
            {"role": "user", "content": [text("a"), text("b", **CACHE)]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "not ours"},
                    text("Let me "),
                    text("look."),
                    {**use("c1", x=1), "caller": {"type": "direct"}},
                    use("c2", "read"),
                ],
            },
            {
                "role": "user",
                "content": [
                    result("c2", [text("one"), text("two")]),
                    result("c1", "boom", is_error=True, **CACHE),
                    text("Go on."),
                ],
            },
        ],
        tools=[{**BASH, **CACHE, "type": "custom", "strict": True}, {"name": "read", "input_schema": {}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        temperature=1,
        top_p=0.5,
        top_k=20,
        stop_sequences=["END", ""],
        stream=True,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert request.messages == (
        Message("system", "You are an agent.\nBe brief."),
        Message("user", "a\nb"),
        Message("assistant", "Let me look.", "hm", (ToolCall("bash", {"x": 1}, "c1"), ToolCall("read", {}, "c2"))),
        Message("tool", "one\ntwo", tool_call_id="c2"),
        Message("tool", "boom", tool_call_id="c1"),
        Message("user", "Go on."),
    )
    assert request.tools == (ToolSpec("bash", "run", SCHEMA), ToolSpec("read"))
    assert (request.model, request.max_tokens, request.stream) == ("policy", 64, True)
    assert (request.temperature, request.top_p, request.top_k, request.stop) == (1.0, 0.5, 20, ("END",))
    assert request.extra == {
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "disable_parallel_tool_use": True,
    }


def claude_code(newest: str | list[Json], older: str | list[Json]) -> tuple[Message, ...]:
    """What Claude Code sends: blocks or strings, moving cache marks, a system message in the list."""
    return parse(
        max_tokens=32_000,
        system=[text("You are Claude Code.", **CACHE), text("Working directory: /work.", **CACHE)],
        messages=[
            {"role": "user", "content": older},
            {"role": "system", "content": "The date is 2026-01-01."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Both.", "signature": "x"},
                    text("Running."),
                    use("call1x0", "Bash", command="ls"),
                    use("call1x1", "Bash", command="pwd"),
                ],
            },
            {"role": "user", "content": [result("call1x1", newest), result("call1x0", [text("a.txt")], **CACHE)]},
        ],
        tools=[{**BASH, "eager_input_streaming": True}, {**BASH, "name": "Read", "defer_loading": False, **CACHE}],
        thinking={"type": "adaptive"},
        metadata={"user_id": "user_0_account__session_0"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        betas=["interleaved-thinking-2025-05-14"],
        stream=True,
    ).messages


def test_a_request_as_claude_code_sends_it() -> None:
    assert claude_code("/work", "Do it.") == (
        Message("system", "You are Claude Code.\nWorking directory: /work."),
        Message("user", "Do it."),
        Message("system", "The date is 2026-01-01."),
        Message(
            "assistant",
            "Running.",
            "Both.",
            (ToolCall("Bash", {"command": "ls"}, "call1x0"), ToolCall("Bash", {"command": "pwd"}, "call1x1")),
        ),
        Message("tool", "/work", tool_call_id="call1x1"),
        Message("tool", "a.txt", tool_call_id="call1x0"),
    )


def test_one_block_reads_like_a_string_and_cache_marks_are_nothing() -> None:
    as_string = claude_code("/work", "Do it.")
    assert claude_code([text("/work", **CACHE)], [text("Do it.", **CACHE)]) == as_string
    assert parse(system="s", cache_control={"type": "ephemeral"}).messages == parse(system=[text("s")]).messages
    answer = {"role": "assistant", "content": "said"}
    assert read(answer) == read({**answer, "content": [text("said", citations=None)]})
    assert parse(messages=[{"role": "system", "content": [text("s")]}, USER]).messages[0] == Message("system", "s")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([result("a"), text("t")], "a t"),
        ([text("t"), result("a")], "t a"),
        ([text("t"), text("u"), result("a"), result("b")], "t\nu a b"),
        ([result("b"), result("a"), text("t"), text("u")], "b a t\nu"),
        ([result("a"), text("t"), result("b")], "a b t"),
        ([text("t"), result("a"), text("u")], "a t\nu"),
        ([text("t"), result("a"), text("")], "t\n a"),
        ([result("a"), text("")], "a"),
        ([text(""), result("a"), text("")], "a"),
        ([result("a")], "a"),
        ([text("")], ""),
        ([], ""),
        ("", ""),
    ],
)
def test_text_beside_tool_results_is_one_message(content: Any, expected: str) -> None:
    found = read({"role": "user", "content": content})
    assert " ".join(m.tool_call_id or m.content for m in found) == expected
    assert [m.role for m in found].count("user") == any(m.role == "user" for m in found)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": [text("")]}])
def test_a_tool_result_may_be_empty(content: Json) -> None:
    block = {"type": "tool_result", "tool_use_id": "a", **content}
    assert read({"role": "user", "content": [block]}) == (Message("tool", "", tool_call_id="a"),)


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_no_system_prompt_is_no_message(system: Any) -> None:
    assert parse(system=system).messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mcp_servers", [{"type": "url", "url": "https://example.org", "name": "m"}]),
        ("container", "container_1"),
        ("container", {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}),
        ("output_format", {"type": "json_schema", "schema": {}}),
        ("compaction", {"type": "summarize"}),
        ("thread", {"type": "create"}),
        ("fallback_credit_token", "t"),
        ("stop", ["END"]),
        ("seed", 3),
        ("n", 2),
        ("never_heard_of", 0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert field in wire.render_error(error)["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {"user_id": "u"}),
        ("thinking", {"type": "enabled", "budget_tokens": 2048}),
        ("thinking", {"type": "disabled"}),
        ("thinking", {"type": "adaptive", "display": "omitted"}),
        ("service_tier", "auto"),
        ("betas", ["context-1m"]),
        ("context_management", {"edits": []}),
        ("output_config", {"effort": "low", "format": None}),
        ("speed", "fast"),
        ("container", None),
        ("mcp_servers", []),
        ("cache_control", {"type": "ephemeral", "ttl": "1h"}),
        ("diagnostics", {"previous_message_id": None}),
        ("never_heard_of", None),
    ],
)
def test_harmless_fields_are_recorded(field: str, value: Any) -> None:
    assert parse(**{field: value}).extra == {field: value}


SERVER_TOOLS = [
    "web_search_20250305", "web_fetch_20250910", "bash_20250124", "text_editor_20250728", "computer_20250124",
    "code_execution_20250825", "memory_20250818", "tool_search_tool_bm25_20251119", "mcp_toolset", "function", 3,
]  # fmt: skip


@pytest.mark.parametrize("kind", SERVER_TOOLS)
def test_tools_of_the_api_itself_are_refused(kind: Any) -> None:
    error = refusal(tools=[BASH, {"type": kind, "name": "x"}])
    assert error.param == "tools[1].type"
    assert repr(kind) in str(error) and wire.render_error(error)["error"]["message"].startswith("tools.1.type: ")


BLOCKS = ["image", "document", "search_result", "server_tool_use", "web_search_tool_result", "container_upload"]


@pytest.mark.parametrize("kind", BLOCKS)
def test_images_and_the_like_are_refused(kind: str) -> None:
    block = {"type": kind, "source": {}}
    nested = [text("a"), result("c"), result("d", [text("see"), block])]
    cases: list[tuple[Json, str]] = [
        ({"messages": [USER, {"role": "user", "content": [text("see"), block]}]}, "messages[1].content[1]"),
        ({"messages": [{"role": "user", "content": nested}]}, "messages[0].content[2].content[1]"),
        ({"messages": [{"role": "assistant", "content": [block]}, USER]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": [block]}, USER]}, "messages[0].content[0]"),
        ({"system": [text("a"), block]}, "system[1]"),
    ]
    for fields, param in cases:
        error = refusal(**fields)
        assert error.param == param and repr(kind) in str(error)


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", use("c")),
        ("user", {"type": "thinking", "thinking": "t", "signature": ""}),
        ("assistant", result("c")),
        ("system", result("c")),
    ],
)
def test_a_block_in_the_wrong_message_is_refused(role: str, block: Json) -> None:
    error = refusal(messages=[{"role": role, "content": [block]}, USER])
    assert error.param == "messages[0].content[0]" and block["type"] in str(error)


def one(**message: Any) -> Json:
    return {"messages": [message, USER]}


def block_of(role: str, **block: Any) -> Json:
    return one(role=role, content=[block])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (one(role="tool", content=""), "messages[0].role"),
        (one(role=["user"], content=""), "messages[0].role"),
        (one(content=""), "messages[0].role"),
        (one(role="user"), "messages[0].content"),
        (one(role="user", content=None), "messages[0].content"),
        (one(role="user", content=5), "messages[0].content"),
        (one(role="assistant", content={"type": "text"}), "messages[0].content"),
        (one(role="user", content=["hi"]), "messages[0].content[0]"),
        (one(role="user", content=[{"text": "hi"}]), "messages[0].content[0]"),
        (block_of("user", type=["text"]), "messages[0].content[0]"),
        (block_of("user", type="text"), "messages[0].content[0].text"),
        (block_of("assistant", type="text", text=1), "messages[0].content[0].text"),
        (block_of("assistant", type="thinking", thinking=1), "messages[0].content[0].thinking"),
        (block_of("assistant", type="thinking", signature=1), "messages[0].content[0].signature"),
        (block_of("assistant", type="tool_use", id="a", name="b"), "messages[0].content[0].input"),
        (block_of("assistant", type="tool_use", id="a", name="b", input="{}"), "messages[0].content[0].input"),
        (block_of("assistant", type="tool_use", id="a", input={}), "messages[0].content[0].name"),
        (block_of("assistant", type="tool_use", name="b", input={}), "messages[0].content[0].id"),
        (block_of("user", type="tool_result", content=""), "messages[0].content[0].tool_use_id"),
        (block_of("user", type="tool_result", tool_use_id="a", content=3), "messages[0].content[0].content"),
        ({"system": 5}, "system"),
        ({"system": [5]}, "system[0]"),
        ({"tools": {"name": "bash"}}, "tools"),
        ({"tools": ["bash"]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": [1]}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "description": 1}]}, "tools[0].description"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "name": "bash"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"output_config": "high"}, "output_config"),
        ({"temperature": 1.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_values_name_the_field(fields: Json, param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    dotted = param.replace("[", ".").replace("]", "")
    message = wire.render_error(error)["error"]["message"]
    assert param in message or message.startswith(f"{dotted}: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"null", b"\xff\xfe"])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    for read_body in (wire.parse_request, wire.parse_count_request):
        with pytest.raises(WireError) as caught:
            read_body(body, {})
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_prefilled_answer_is_refused_in_the_apis_words() -> None:
    for content in ("The best answer is (", [text("(")], []):
        error = refusal(messages=[USER, {"role": "assistant", "content": content}])
        assert wire.render_error(error)["error"]["message"] == (
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )


def test_no_tools_may_be_chosen_or_offered() -> None:
    assert parse(tools=[BASH], tool_choice={"type": "none"}).tools == ()
    assert parse(tools=[BASH], tool_choice={"type": "auto"}).tools[0].name == "bash"
    assert parse(tools=None, tool_choice=None).tools == () and parse(tools=[]).tools == ()
    assert refusal(tools=[{"type": "bash_20250124"}], tool_choice={"type": "none"}).param == "tools[0].type"


def test_a_count_needs_no_limit_and_may_end_in_an_answer() -> None:
    body: Json = {"model": "policy", "system": "s", "messages": [USER], "tools": [BASH]}
    counted = wire.parse_count_request(orjson.dumps(body), {"beta": "true"})
    asked = parse(**body)
    assert (counted.messages, counted.tools) == (asked.messages, asked.tools)
    body["messages"] = [USER, {"role": "assistant", "content": "hello"}]
    assert wire.parse_count_request(orjson.dumps(body), {}).messages[-1] == Message("assistant", "hello")
    with pytest.raises(WireError) as caught:
        wire.parse_count_request(orjson.dumps({**body, "container": "c"}), {})
    assert caught.value.param == "container"
    assert wire.render_token_count(17) == {"input_tokens": 17}


# What goes out.

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
    assert wire.render_error(error)["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"
    assert wire.render_error(error)["error"]["type"] == "invalid_request_error"
    assert not wire.IN_STREAM
