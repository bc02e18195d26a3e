"""Responses as JSON: what is read, what is refused by name, and one message however it is sent and echoed."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.wire import openai_responses as wire
from clawgym_env.wire.base import Reply, Usage, parse_arguments
from tests.json_values import JSON

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH: Json = {"type": "function", "name": "bash", "description": "run", "parameters": SCHEMA, "strict": False}
GRAMMAR: Json = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "edit", "format": GRAMMAR}
ENCRYPTED = "reasoning.encrypted_content"
#: The whole stream of the SDK; its union is told apart by ``type``.
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parse(**fields: Any) -> ChatRequest:
    return wire.parse_request(orjson.dumps({"model": "policy", "input": [USER], **fields}), {})


def read(*items: Json) -> tuple[Message, ...]:
    """Messages of a conversation, without the user message that a request must end with."""
    return parse(input=[*items, USER]).messages[:-1]


def refusal(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def message(text: str, **more: Any) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def thought(text: str, **more: Any) -> Json:
    return {"type": "reasoning", "id": "rs_9", "summary": [{"type": "summary_text", "text": text}], **more}


def call(ident: str, arguments: str = '{"command": "ls"}', **more: Any) -> Json:
    return {"type": "function_call", "call_id": ident, "name": "bash", "arguments": arguments, **more}


def output(ident: str, said: Any = "ok", kind: str = "function_call_output") -> Json:
    return {"type": kind, "call_id": ident, "output": said}


def reply(said: Message, finish: Any = "stop", **fields: Any) -> Reply:
    return Reply(7, 1_700_000_000, parse(tools=[BASH, PATCH], **fields), said, finish, Usage(11, 5, 3))


def events(raw: Iterable[bytes], start: int = 0) -> list[Json]:
    """Payloads of a stream, checked for its form."""
    out = []
    for number, event in enumerate(raw, start):
        name, data, *rest = event.split(b"\n")
        payload = orjson.loads(data.removeprefix(b"data: "))
        assert rest == [b"", b""] and name == b"event: " + payload["type"].encode()
        assert payload["sequence_number"] == number
        EVENT.validate_python(payload)
        out.append(payload)
    return out


def streamed(answer: Reply) -> list[Json]:
    deltas = list(wire.stream_deltas(answer))
    (end,) = wire.stream_end(answer)
    return events([*deltas, end])


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
        (call("c", namespace="agents"), "input[1].namespace"),
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
        "namespace",
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


PATCHED = ToolCall("apply_patch", {"input": "*** Begin\n+ü"}, "call7x1")
FULL = Message("assistant", "I do.", "Hm.", (ToolCall("bash", {"command": "ls"}, "call7x0"), PATCHED))
ITEMS: list[Json] = [
    {
        "type": "reasoning",
        "id": "rs_7",
        "summary": [{"type": "summary_text", "text": "Hm."}],
        "encrypted_content": "clawgym1.SG0u",
    },
    {
        "type": "message",
        "id": "msg_7",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I do.", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "id": "fc_7x0",
        "status": "completed",
        "call_id": "call7x0",
        "name": "bash",
        "arguments": '{"command":"ls"}',
    },
    {
        "type": "custom_tool_call",
        "id": "ctc_7x1",
        "status": "completed",
        "call_id": "call7x1",
        "name": "apply_patch",
        "input": "*** Begin\n+ü",
    },
]
RESPONSE: Json = {
    "id": "resp_7",
    "object": "response",
    "created_at": 1_700_000_000,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "metadata": None,
    "model": "policy",
    "output": ITEMS,
    "parallel_tool_calls": True,
    "temperature": 0.5,
    "top_p": None,
    "max_output_tokens": None,
    "tool_choice": "auto",
    "tools": [BASH, PATCH],
    "usage": {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    },
}


def test_a_whole_answer() -> None:
    body = wire.render_reply(reply(FULL, include=[ENCRYPTED], temperature=0.5))
    assert body == RESPONSE
    assert Response.model_validate(body, strict=True).output_text == "I do."


def test_a_whole_stream() -> None:
    answer = reply(FULL, include=[ENCRYPTED], temperature=0.5)
    begun = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}
    reasoning, said, function, custom = ITEMS
    summary, part = reasoning["summary"][0], said["content"][0]
    at = [{"item_id": item["id"], "output_index": i} for i, item in enumerate(ITEMS)]
    opening = [
        {"type": "reasoning", "id": "rs_7", "summary": []},
        {**said, "status": "in_progress", "content": []},
        {**function, "status": "in_progress", "arguments": ""},
        {**custom, "status": "in_progress", "input": ""},
    ]
    first, text = {**at[0], "summary_index": 0}, {**at[1], "content_index": 0}
    expected: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": opening[0]},
        {"type": "response.reasoning_summary_part.added", **first, "part": {"type": "summary_text", "text": ""}},
        {"type": "response.reasoning_summary_text.delta", **first, "delta": "Hm."},
        {"type": "response.reasoning_summary_text.done", **first, "text": "Hm."},
        {"type": "response.reasoning_summary_part.done", **first, "part": summary},
        {"type": "response.output_item.done", "output_index": 0, "item": reasoning},
        {"type": "response.output_item.added", "output_index": 1, "item": opening[1]},
        {"type": "response.content_part.added", **text, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **text, "logprobs": [], "delta": "I do."},
        {"type": "response.output_text.done", **text, "logprobs": [], "text": "I do."},
        {"type": "response.content_part.done", **text, "part": part},
        {"type": "response.output_item.done", "output_index": 1, "item": said},
        {"type": "response.output_item.added", "output_index": 2, "item": opening[2]},
        {"type": "response.function_call_arguments.delta", **at[2], "delta": '{"command":"ls"}'},
        {"type": "response.function_call_arguments.done", **at[2], "arguments": '{"command":"ls"}'},
        {"type": "response.output_item.done", "output_index": 2, "item": function},
        {"type": "response.output_item.added", "output_index": 3, "item": opening[3]},
        {"type": "response.custom_tool_call_input.delta", **at[3], "delta": "*** Begin\n+ü"},
        {"type": "response.custom_tool_call_input.done", **at[3], "input": "*** Begin\n+ü"},
        {"type": "response.output_item.done", "output_index": 3, "item": custom},
        {"type": "response.completed", "response": RESPONSE},
    ]
    assert streamed(answer) == [{"sequence_number": n, **event} for n, event in enumerate(expected)]
    assert wire.stream_type(answer.request) == b"text/event-stream"
    assert wire.keep_alive(answer.request) == b": keep-alive\n\n"


MESSAGES = {
    "text": Message("assistant", "Hello."),
    "nothing": Message("assistant", ""),
    "call": Message("assistant", "", None, (ToolCall("bash", {"command": "ls -la"}, "call7x0"),)),
    "parallel": FULL,
    "reasoning": Message("assistant", "Yes.", "Because."),
    "only reasoning": Message("assistant", "", "Because."),
    "broken": Message("assistant", "", None, (ToolCall("bash", '{"command": "l', "call7x0"),)),
    "empty": Message("assistant", "", None, (ToolCall("apply_patch", {"input": ""}, "call7x0"),)),
    "unicode": Message("assistant", "żółć \U0001f600 \x00\n", "ł", (ToolCall("ü", {"ß": ["\u2028"]}, "call7x0"),)),
}


def texts(payloads: list[Json], kind: str) -> list[str]:
    """Deltas of one kind, joined for each item."""
    found: dict[int, str] = {}
    for payload in payloads:
        if payload["type"] == f"response.{kind}.delta":
            found[payload["output_index"]] = found.get(payload["output_index"], "") + payload["delta"]
    return list(found.values())


@pytest.mark.parametrize("include", [[], [ENCRYPTED]])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", list(MESSAGES))
def test_streamed_equals_unstreamed(name: str, finish: str, include: list[str]) -> None:
    answer = reply(MESSAGES[name], finish, include=include)
    whole = wire.render_reply(answer)
    Response.model_validate(whole, strict=True)
    payloads = streamed(answer)
    assert payloads[-1]["response"] == whole
    calls = [i for i in whole["output"] if i["type"].endswith("_call")]
    done = [p["item"] for p in payloads if p["type"] == "response.output_item.done"]
    assert done == whole["output"] if finish == "stop" else done == [i for i in whole["output"] if i not in calls]
    said = MESSAGES[name]
    assert texts(payloads, "output_text") == [said.content][: bool(said.content)]
    assert texts(payloads, "reasoning_summary_text") == ([said.reasoning] if said.reasoning else [])
    shown = texts(payloads, "function_call_arguments") + texts(payloads, "custom_tool_call_input")
    assert shown == [t for t in (c.get("arguments", c.get("input")) for c in calls) if t]
    assert ("encrypted_content" in whole["output"][0]) == (said.reasoning is not None and bool(include))


@pytest.mark.parametrize("name", list(MESSAGES))
def test_a_truncated_answer_says_so_and_lets_nothing_run(name: str) -> None:
    """Codex runs a call at its ``output_item.done``."""
    answer = reply(MESSAGES[name], "length")
    body = wire.render_reply(answer)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [i["call_id"] for i in body["output"] if "call_id" in i] == [c.id for c in MESSAGES[name].tool_calls]
    assert {i["status"] for i in body["output"] if i["type"] != "reasoning"} == {"incomplete"}
    payloads = streamed(answer)
    assert payloads[-1]["type"] == "response.incomplete"
    finished = {p["item"]["type"] for p in payloads if p["type"] == "response.output_item.done"}
    assert finished <= {"reasoning", "message"}
    assert not {p["type"] for p in payloads} & {
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.done",
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": "a\nb"}, "a\nb"),
        ({"input": ""}, ""),
        ({"input": "a", "more": 1}, "a"),
        ({"input": ["a"]}, '{"input":["a"]}'),
        ({"patch": "a"}, '{"patch":"a"}'),
        ({}, "{}"),
        ('{"input": "a', '{"input": "a'),
    ],
)
def test_a_tool_that_takes_text_is_given_text(arguments: Any, text: str) -> None:
    said = Message("assistant", "", None, (ToolCall("apply_patch", arguments, "c"), ToolCall("bash", arguments, "d")))
    custom, function = wire.render_reply(reply(said))["output"]
    assert (custom["type"], custom["input"]) == ("custom_tool_call", text)
    assert function["type"] == "function_call"
    assert parse_arguments(function["arguments"]) == arguments
    assert read(custom)[0].tool_calls == (ToolCall("apply_patch", {"input": text}, "c"),)


def test_what_was_asked_is_repeated_in_the_answer() -> None:
    asked = {"metadata": {"a": "b"}, "parallel_tool_calls": False, "tool_choice": "none", "max_output_tokens": 5}
    body = wire.render_reply(reply(MESSAGES["text"], **asked))
    assert {k: body[k] for k in asked} == asked and body["tools"] == []
    plain = Reply(7, 0, parse(tools=[{"type": "custom", "name": "f"}]), MESSAGES["text"], "stop", Usage(1, 1, 0))
    assert wire.render_reply(plain)["tools"] == [
        {"type": "custom", "name": "f", "description": "", "format": {"type": "text"}}
    ]


NAMES = st.text(min_size=1).filter(lambda name: name != "apply_patch")
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3) | st.text().filter(lambda t: parse_arguments(t) == t)
FUNCTIONS = st.builds(ToolCall, NAMES, ARGUMENTS, st.text(min_size=1))
CUSTOMS = st.builds(ToolCall, st.just("apply_patch"), st.fixed_dictionaries({"input": st.text()}), st.text(min_size=1))


@given(
    content=st.text(),
    reasoning=st.none() | st.text(min_size=1),
    calls=st.lists(FUNCTIONS | CUSTOMS, max_size=3),
    include=st.booleans(),
    finish=st.sampled_from(["stop", "length"]),
    through_sdk=st.booleans(),
)
def test_a_rendered_message_is_read_back_as_it_was(
    content: str, reasoning: str | None, calls: list[ToolCall], include: bool, finish: str, through_sdk: bool
) -> None:
    said = Message("assistant", content, reasoning, tuple(calls))
    answer = reply(said, finish, include=[ENCRYPTED] if include else [])
    body = wire.render_reply(answer)
    assert streamed(answer)[-1]["response"] == orjson.loads(orjson.dumps(body))
    items = body["output"]
    if through_sdk:
        items = [i.model_dump(mode="json") for i in Response.model_validate(body).output]
    assert read(USER, *items, *(output(c.id) for c in calls))[1] == said


@given(st.text(min_size=1), st.text())
def test_reasoning_survives_in_what_a_stateless_client_keeps(reasoning: str, content: str) -> None:
    item, *rest = wire.render_reply(reply(Message("assistant", content, reasoning), include=[ENCRYPTED]))["output"]
    kept = {"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]}
    assert read(kept, *rest) == (Message("assistant", content, reasoning),)


def sdk_reads(state: ResponseStreamState[None], payload: Json) -> list[str]:
    """What the SDK's accumulation tells its user of an event; its list of codes lacks one that the API sends."""
    failure = payload["response"]["error"]
    if failure is not None and failure["code"] not in wire.IN_STREAM:
        EVENT.validate_python(payload)
    lenient = construct_type(type_=ResponseStreamEvent, value=payload)
    return [event.type for event in state.handle_event(lenient)]  # type: ignore[arg-type]


def test_errors_are_in_the_apis_form() -> None:
    error = WireError("no", status=400, param="prompt", code="unsupported_parameter")
    assert wire.render_error(error) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "prompt", "code": "unsupported_parameter"}
    }
    assert wire.render_error(WireError("no", status=500))["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (wire.overflow(ContextOverflow(9, 8)), "context_length_exceeded"),
        (WireError("has ended", status=410, code="rollout_ended"), "invalid_prompt"),
        (WireError("down", status=500, code="engine_error"), "server_error"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_an_error_fails_the_streamed_response(error: WireError, code: str, known: bool) -> None:
    request = parse(tools=[BASH, PATCH], stream=True) if known else None
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=[], text_format=openai.omit)
    created, failed = (orjson.loads(e.split(b"\n")[1][6:]) for e in wire.stream_error(error, request))
    assert (created["type"], created["sequence_number"]) == ("response.created", 0)
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 1)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert [kind for payload in (created, failed) for kind in sdk_reads(state, payload)] == [
        "response.created",
        "response.failed",
    ]


def test_an_overflow_says_what_harnesses_look_for() -> None:
    error = wire.overflow(ContextOverflow(5000, 4096))
    assert (error.status, error.param, error.code) == (400, "input", "context_length_exceeded")
    assert str(error).startswith("Your input exceeds the context window of this model. Please adjust your input")
    assert "5000" in str(error) and "4096" in str(error)
    assert error.code in wire.IN_STREAM
