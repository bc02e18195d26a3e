"""Responses as JSON: what is read, and what is refused by name."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from clawgym_env.types import Message, ToolCall, ToolSpec
from clawgym_env.wire import openai_responses as wire
from tests.wires.openai_responses import (
    AGENTS,
    BASH,
    ENCRYPTED,
    GRAMMAR,
    PATCH,
    SCHEMA,
    USER,
    Json,
    call,
    message,
    output,
    parse,
    read,
    refusal,
    reply,
    thought,
)


def test_a_whole_request_is_read() -> None:
    request = wire.parse_request(
        orjson.dumps(
            {
                "model": "policy",
                "instructions": "Be an agent.",
                "input": [
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
                    {
                        "role": "user",
                        "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
                    },
                    thought("hm", content=None, encrypted_content=None, status=None),
                    message("I look.", id="msg_1", status="completed", phase="commentary"),
                    call("call1x0", id="fc_1", status="completed"),
                    call("call1x1", "{broken"),
                    {
                        "type": "custom_tool_call",
                        "id": "ctc_1",
                        "status": "completed",
                        "call_id": "call1x2",
                        "name": "apply_patch",
                        "input": "*** Begin",
                    },
                    output("call1x0", [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]),
                    output("call1x1", ""),
                    output("call1x2", "Done.", "custom_tool_call_output"),
                ],
                "tools": [BASH, PATCH],
                "tool_choice": "auto",
                "temperature": 1,
                "top_p": 0.5,
                "max_output_tokens": 9,
                "stream": True,
                "store": False,
                "include": [ENCRYPTED],
                "reasoning": {"effort": "high", "summary": "auto"},
                "text": {"verbosity": "low", "format": {"type": "text"}},
                "parallel_tool_calls": False,
                "client_metadata": {"k": "v"},
            }
        ),
        {},
    )
    calls = (
        ToolCall("bash", {"command": "ls"}, "call1x0"),
        ToolCall("bash", "{broken", "call1x1"),
        ToolCall("apply_patch", {"input": "*** Begin"}, "call1x2"),
    )
    assert request.messages == (
        Message("system", "Be an agent."),
        Message("system", "be brief"),
        Message("user", "a\nb"),
        Message("assistant", "I look.", "hm", calls),
        Message("tool", "x\ny", tool_call_id="call1x0"),
        Message("tool", "", tool_call_id="call1x1"),
        Message("tool", "Done.", tool_call_id="call1x2"),
    )
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert request.tools == (ToolSpec("bash", "run", SCHEMA), ToolSpec("apply_patch", "edit", free, free_text=True))
    assert (request.model, request.temperature, request.top_p, request.max_tokens) == ("policy", 1.0, 0.5, 9)
    assert request.stream and request.wants == {ENCRYPTED}
    assert request.extra == {
        "tool_choice": "auto",
        "store": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "parallel_tool_calls": False,
        "client_metadata": {"k": "v"},
        "tools[0].strict": False,
        "tools[1].format": GRAMMAR,
    }


def test_the_shortest_request_is_a_string() -> None:
    request = parse(input="hi")
    assert request.messages == (Message("user", "hi"),)
    assert "not empty" in str(refusal(input=[]))
    assert not request.stream and request.tools == () and request.wants == frozenset() and request.extra == {}
    assert parse(instructions="").messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("background_options", {"completion_window": "2h"}),
        ("truncation", "auto"),
        ("prompt", {"id": "pmpt_1"}),
        ("top_logprobs", 3),
        ("max_tool_calls", 2),
        ("moderation", {"model": "m"}),
        ("context_management", [{"type": "compaction"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "name": "bash"}),
        ("tool_choice", {"type": "custom", "name": "apply_patch"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("include", ["message.output_text.logprobs"]),
        ("include", [ENCRYPTED, "web_search_call.action.sources"]),
        ("seed", 3),
        ("messages", [USER]),
        ("never_heard_of", 0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field and error.code == "unsupported_parameter"
    assert field in str(error) or (field == "include" and value[-1] in str(error))


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_forms_of_text_that_cannot_be_enforced_are_refused(kind: str) -> None:
    assert refusal(text={"format": {"type": kind}}).param == "text.format"
    assert refusal(text={"never_heard_of": 1}).param == "text.never_heard_of"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("metadata", {"a": "b"}),
        ("user", "u"),
        ("safety_identifier", "s"),
        ("prompt_cache_key", "k"),
        ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {"mode": "implicit"}),
        ("service_tier", "flex"),
        ("parallel_tool_calls", True),
        ("reasoning", {"effort": "low", "generate_summary": "auto"}),
        ("text", {"verbosity": "high"}),
        ("stream_options", {"include_obfuscation": False}),
        ("client_metadata", {"x": "y"}),
        ("background", False),
        ("truncation", "disabled"),
        ("top_logprobs", 0),
        ("tool_choice", "none"),
        ("previous_response_id", None),
        ("prompt", None),
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
        ({"input": None}, "input"),
        ({"input": {}}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"instructions": ["be"]}, "instructions"),
        ({"tools": {"name": "bash"}}, "tools"),
        ({"tools": ["bash"]}, "tools[0]"),
        ({"tools": [BASH, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{**BASH, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**BASH, "parameters": [1]}]}, "tools[0].parameters"),
        ({"tools": [{**BASH, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**BASH, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{**BASH, "format": GRAMMAR}]}, "tools[0].format"),
        ({"tools": [{**PATCH, "parameters": {}}]}, "tools[0].parameters"),
        ({"tools": [{**PATCH, "format": "text"}]}, "tools[0].format"),
        ({"tools": [{**PATCH, "format": {"type": "json"}}]}, "tools[0].format.type"),
        ({"tools": [{**AGENTS, "name": None}]}, "tools[0].name"),
        ({"tools": [{**AGENTS, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**AGENTS, "tools": []}]}, "tools[0].tools"),
        ({"tools": [{**AGENTS, "tools": {}}]}, "tools[0].tools"),
        ({"tools": [{**AGENTS, "strict": True}]}, "tools[0].strict"),
        ({"tools": [BASH, {**AGENTS, "tools": [BASH, "f"]}]}, "tools[1].tools[1]"),
        ({"tools": [{**AGENTS, "tools": [{**BASH, "parameters": 1}]}]}, "tools[0].tools[0].parameters"),
        ({"tools": [{**AGENTS, "tools": [AGENTS]}]}, "tools[0].tools[0].type"),
        ({"include": 3}, "include"),
        ({"text": "plain"}, "text"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_types_name_the_field(fields: Json, param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({}, "input[1]"),
        ({"id": "msg_1"}, "input[1]"),
        ({"type": "item_reference", "id": "msg_1"}, "input[1]"),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, "input[1]"),
        ({"type": "local_shell_call", "id": "lsh_1"}, "input[1]"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[1]"),
        ({"type": "additional_tools", "role": "developer", "tools": []}, "input[1]"),
        ({"type": ["message"], "role": "user"}, "input[1]"),
        ({"type": "message", "content": "x"}, "input[1].role"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": ["user"], "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0]"),
        ({"type": "reasoning", "summary": "x"}, "input[1].summary"),
        ({"type": "reasoning", "summary": [{"type": "input_text", "text": "x"}]}, "input[1].summary[0]"),
        ({"type": "reasoning", "encrypted_content": 3}, "input[1].encrypted_content"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[1].arguments"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input[1].arguments"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id"),
        (call("c", namespace=3), "input[1].namespace"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[1].input"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "input[1].output"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": {}}, "input[1].output"),
    ],
)
def test_bad_items_are_named(item: Json, param: str) -> None:
    error = refusal(input=[USER, item, USER])
    assert error.param == param


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_images_and_the_like_are_refused(kind: str) -> None:
    error = refusal(input=[{"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": kind}]}])
    assert error.param == "input[0].content[1]" and kind in str(error)
    error = refusal(input=[call("c"), output("c", [{"type": kind}])])
    assert error.param == "input[1].output[0]" and kind in str(error)


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "mcp",
        "image_generation",
        "computer",
        "computer_use_preview",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        None,
        ["function"],
    ],
)
def test_tools_that_run_elsewhere_are_refused(kind: Any) -> None:
    error = refusal(tools=[BASH, {"type": kind, "name": "x"}])
    assert error.param == "tools[1].type" and repr(kind) in str(error)


def test_no_tools_may_be_chosen_or_offered() -> None:
    assert parse(tools=[BASH], tool_choice="none").tools == ()
    assert parse(tools=None).tools == () and parse(tools=[]).tools == ()
    assert parse(tools=[{"type": "function", "name": "f"}]).tools == (ToolSpec("f"),)
    assert parse(tools=[{"type": "custom", "name": "f"}]).tools[0].free_text


def test_tools_in_a_namespace_bear_its_name_and_its_description_is_shown_once() -> None:
    request = parse(tools=[BASH, AGENTS, PATCH])
    assert [(t.name, t.description, t.free_text) for t in request.tools] == [
        ("bash", "run", False),
        ("agents__spawn", "Sub-agents.\n\nbegin", False),
        ("agents__wait", "run", False),
        ("agents__tell", "edit", True),
        ("apply_patch", "edit", True),
    ]
    assert [t.parameters for t in request.tools[:3]] == [SCHEMA] * 3
    assert {key for key in request.extra if key.startswith("tools[1].")} == {
        "tools[1].tools[0].strict",
        "tools[1].tools[1].strict",
        "tools[1].tools[2].format",
    }
    bare = parse(tools=[{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]).tools
    assert [(t.name, t.description) for t in bare] == [("n__f", "")]
    assert parse(tools=[AGENTS], tool_choice="none").tools == ()


A, B = ToolCall("bash", {"command": "ls"}, "a"), ToolCall("bash", {"command": "ls"}, "b")


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([message("x")], [Message("assistant", "x")]),
        ([{"role": "assistant", "content": "x"}], [Message("assistant", "x")]),
        ([message("x"), message("y")], [Message("assistant", "x"), Message("assistant", "y")]),
        ([thought("t"), message("x"), call("a")], [Message("assistant", "x", "t", (A,))]),
        ([thought("t"), thought("u"), call("a"), call("b")], [Message("assistant", "", "tu", (A, B))]),
        ([call("a"), call("b")], [Message("assistant", "", None, (A, B))]),
        ([call("a"), message("x")], [Message("assistant", "", None, (A,)), Message("assistant", "x")]),
        (
            [call("a"), thought("t"), call("b")],
            [Message("assistant", "", None, (A,)), Message("assistant", "", "t", (B,))],
        ),
        ([message("x"), thought("t"), message("y")], [Message("assistant", "x"), Message("assistant", "y", "t")]),
        (
            [call("a"), output("a"), call("b"), output("b")],
            [
                Message("assistant", "", None, (A,)),
                Message("tool", "ok", tool_call_id="a"),
                Message("assistant", "", None, (B,)),
                Message("tool", "ok", tool_call_id="b"),
            ],
        ),
        (
            [message("x"), USER, message("y")],
            [Message("assistant", "x"), Message("user", "hi"), Message("assistant", "y")],
        ),
        ([USER, {"role": "system", "content": "s"}], [Message("user", "hi"), Message("system", "s")]),
        ([thought("")], []),
        ([thought(""), message("")], [Message("assistant", "")]),
        ([thought("t")], [Message("assistant", "", "t")]),
    ],
)
def test_items_make_turns(items: list[Json], turns: list[Message]) -> None:
    assert read(*items) == tuple(turns)


def test_pieces_of_an_answer_join_and_blocks_of_others_are_paragraphs() -> None:
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}, {"type": "text", "text": "b"}]
    assert read({"role": "assistant", "content": parts}) == (Message("assistant", "anob"),)
    assert read({"role": "user", "content": parts}) == (Message("user", "a\nno\nb"),)
    assert read({"role": "user", "content": []}) == (Message("user", ""),)


def test_reasoning_is_the_fullest_text_that_an_item_holds() -> None:
    ours = wire.render_reply(reply(Message("assistant", "x", "all of it"), include=[ENCRYPTED]))["output"][0]
    assert ours["encrypted_content"].startswith("clawgym1.")
    assert (
        wire.render_reply(reply(Message("assistant", "", "~~~???"), include=[ENCRYPTED]))["output"][0][
            "encrypted_content"
        ]
        == "clawgym1.fn5-Pz8_"
    )
    content = [{"type": "reasoning_text", "text": "full"}]

    def reasoning(**fields: Any) -> str | None:
        return read({**thought("short"), **fields}, message("x"))[0].reasoning

    assert reasoning(encrypted_content=ours["encrypted_content"], summary=[]) == "all of it"
    assert reasoning(encrypted_content=ours["encrypted_content"], content=content) == "all of it"
    assert reasoning(content=content) == "full"
    assert reasoning() == "short"
    for foreign in ("gAAAAABm", "clawgym1.SG0u~", "clawgym1.ź", "clawgym1." + base64.b64encode(b"\xff").decode(), ""):
        assert reasoning(encrypted_content=foreign) == "short"
    assert reasoning(encrypted_content="gAAAAABm", summary=[]) is None


def test_an_answer_cannot_be_begun_for_the_policy() -> None:
    error = refusal(input=[USER, message("So")])
    assert error.param == "input" and "prefill" in str(error)
    assert "No tool output found for function call call1x0." in str(refusal(input=[USER, call("call1x0")]))
    assert refusal(input=[thought("")]).param == "input"
    assert parse(input=[USER, call("a"), output("a")]).messages[-1].role == "tool"
    assert parse(input=[USER, message("x"), {"role": "developer", "content": "go on"}]).messages[-1].role == "system"
