"""Responses as JSON: one message however it is sent and echoed, and what is said of errors."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import Message, ToolCall
from clawgym_env.wire import openai_responses as wire
from clawgym_env.wire.base import Reply, Usage, parse_arguments
from tests.json_values import JSON
from tests.wires.openai_responses import (
    AGENTS,
    BASH,
    ENCRYPTED,
    EVENT,
    PATCH,
    USER,
    Json,
    events,
    output,
    parse,
    read,
    reply,
    streamed,
)

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


@pytest.mark.parametrize("tools", [[BASH, AGENTS, PATCH], [AGENTS, BASH], [AGENTS], [AGENTS, {**AGENTS, "name": "b"}]])
def test_namespaces_are_repeated_in_the_answer(tools: list[Json]) -> None:
    body = wire.render_reply(Reply(7, 0, parse(tools=tools), MESSAGES["text"], "stop", Usage(1, 1, 0)))
    assert body["tools"] == tools
    Response.model_validate(body, strict=True)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("agents__spawn", {"type": "function_call", "namespace": "agents", "name": "spawn"}),
        ("agents__tell", {"type": "custom_tool_call", "namespace": "agents", "name": "tell"}),
        ("bash", {"type": "function_call", "name": "bash"}),
        ("spawn", {"type": "function_call", "name": "spawn"}),  # as the model wrote it: no tool of that name is there
        ("agents__other", {"type": "function_call", "name": "agents__other"}),
    ],
)
def test_a_call_says_whose_namespace_it_is_in(name: str, fields: Json) -> None:
    said = Message("assistant", "", None, (ToolCall(name, {"input": "x"}, "call7x0"),))
    answer = Reply(7, 0, parse(tools=[BASH, AGENTS]), said, "stop", Usage(1, 1, 0))
    body = wire.render_reply(answer)
    Response.model_validate(body, strict=True)
    (item,) = body["output"]
    assert {k: item[k] for k in ("type", "namespace", "name") if k in item} == fields
    added, done = (
        p["item"] for p in streamed(answer) if p["type"] in ("response.output_item.added", "response.output_item.done")
    )
    assert done == item and {k: added[k] for k in fields} == fields
    assert read(item, output("call7x0"))[0] == said
    assert read({**item, "namespace": item.get("namespace")}, output("call7x0"))[0] == said


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


@pytest.mark.parametrize("name", list(MESSAGES))
def test_an_error_after_an_answers_pieces_goes_on_counting(name: str) -> None:
    answer, error = reply(MESSAGES[name]), WireError("has ended", status=410, code="rollout_ended")
    told = events([*wire.stream_deltas(answer), *wire.stream_error(error, answer.request, answer)])
    assert [e["type"] for e in told].count("response.created") == 1
    failed = told[-1]["response"]
    assert told[-1]["type"] == "response.failed" and failed["error"]["code"] == "invalid_prompt"
    assert failed == {**told[0]["response"], "status": "failed", "error": failed["error"]}


def test_an_overflow_says_what_harnesses_look_for() -> None:
    error = wire.overflow(ContextOverflow(5000, 4096))
    assert (error.status, error.param, error.code) == (400, "input", "context_length_exceeded")
    assert str(error).startswith("Your input exceeds the context window of this model. Please adjust your input")
    assert "(5000 tokens; at most 4095)" in str(error)
    assert error.code in wire.IN_STREAM
