"""Anthropic Messages as JSON: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from clawgym_env.errors import WireError
from clawgym_env.types import Message, ToolCall, ToolSpec
from clawgym_env.wire import anthropic_messages as wire
from tests.wires.anthropic_messages import BASH, CACHE, SCHEMA, USER, Json, parse, read, refusal, result, text, use


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
        Message("tool", "boom", tool_call_id="c1", is_error=True),
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
