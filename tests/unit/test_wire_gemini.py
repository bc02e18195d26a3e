"""Gemini's generateContent as JSON: what is read, what is refused by name, and one message however it is sent."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.wire import gemini as wire
from clawgym_env.wire.base import RAW_ARGUMENTS, Reply, Usage
from clawgym_env.wire.gemini_contents import read_signature, signature_of

Json = dict[str, Any]
USER: Json = {"role": "user", "parts": [{"text": "hi"}]}
SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: Json = {"name": "bash", "description": "run", "parametersJsonSchema": SCHEMA}
STREAM = {"method": "streamGenerateContent", "alt": "sse"}


def parse(_params: Mapping[str, str] | None = None, **fields: Any) -> ChatRequest:
    params = {"model": "policy", "method": "generateContent", **(_params or {})}
    return wire.parse_request(orjson.dumps({"contents": [USER], **fields}), params)


def read(*contents: Json) -> tuple[Message, ...]:
    """Messages of a conversation, without the user message that a request must end with."""
    return parse(contents=[*contents, USER]).messages[:-1]


def refusal(_params: Mapping[str, str] | None = None, **fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(_params, **fields)
    assert caught.value.status == 400
    return caught.value


def call(name: str, _more: Json | None = None, **args: Any) -> Json:
    return {"functionCall": {"name": name, "args": args}, **(_more or {})}


def answer(name: str, response: Any, **more: Any) -> Json:
    return {"functionResponse": {"name": name, "response": response, **more}}


def model(*parts: Json) -> Json:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Json) -> Json:
    return {"role": "user", "parts": list(parts)}


def reply(message: Message, finish: Any = "stop", cached: int = 3, **asked: Any) -> Reply:
    return Reply(7, 1_700_000_000, parse(**asked), message, finish, Usage(11, 5, cached))


def thoughts(**more: Any) -> Json:
    return {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}, **more}


def test_a_whole_request_is_read() -> None:
    request = parse(
        STREAM,
        contents=[
            {"parts": [{"text": "a"}, {"text": "b"}]},
            model(
                {"text": "hm", "thought": True},
                {"text": "Let me "},
                {"text": "look."},
                {"functionCall": {"id": "c1", "name": "bash", "args": {"x": 1}}, "thoughtSignature": "bm90IG91cnM="},
                {"functionCall": {"id": "c2", "name": "read"}},
            ),
            {"role": "function", "parts": [answer("read", {"output": "two"}, id="c2"), answer("bash", {"error": "x"})]},
            user({"text": "go on"}),
        ],
        systemInstruction={"role": "user", "parts": [{"text": "You are an agent."}, {"text": "Be brief."}]},
        tools=[{"functionDeclarations": [BASH]}, {"functionDeclarations": [{"name": "nothing"}]}],
        toolConfig={"functionCallingConfig": {"mode": "AUTO"}},
        generationConfig={
            "temperature": 1,
            "topP": 0.5,
            "topK": 20.0,
            "maxOutputTokens": 9,
            "stopSequences": ["END", ""],
            "seed": 3,
            "candidateCount": 1,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 100},
        },
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    )
    assert request.messages == (
        Message("system", "You are an agent.\nBe brief."),
        Message("user", "a\nb"),
        Message("assistant", "Let me look.", "hm", (ToolCall("bash", {"x": 1}, "c1"), ToolCall("read", {}, "c2"))),
        Message("tool", "two", tool_call_id="c2"),
        Message("tool", "x", tool_call_id="c1"),
        Message("user", "go on"),
    )
    assert request.tools == (ToolSpec("bash", "run", SCHEMA), ToolSpec("nothing"))
    assert (request.model, request.stream) == ("policy", True)
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (1.0, 0.5, 20, 9)
    assert (request.stop, request.seed) == (("END",), 3)
    assert request.wants == {wire.THOUGHTS, wire.EVENTS}
    assert request.extra == {
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "candidateCount": 1,
        "thinkingBudget": 100,
    }


def test_snake_case_is_read_at_every_level() -> None:
    snake = parse(
        contents=[
            model({"function_call": {"name": "bash", "args": {"in_place": 1}}, "thought_signature": "bm8="}),
            user({"function_response": {"name": "bash", "response": {"exit_code": 0}}}),
        ],
        system_instruction={"parts": [{"text": "s"}]},
        tools=[
            {
                "function_declarations": [
                    {"name": "bash", "parameters_json_schema": {"min_items": 1}},
                    {
                        "name": "edit",
                        "parameters": {
                            "type": "OBJECT",
                            "properties": {"old_text": {"any_of": [{"type": "STRING"}], "min_length": 1}},
                        },
                    },
                ]
            }
        ],
        tool_config={"function_calling_config": {"mode": "AUTO"}},
        generation_config={
            "max_output_tokens": 5,
            "stop_sequences": ["x"],
            "thinking_config": {"include_thoughts": True},
        },
        safety_settings=[],
    )
    assert snake.messages == (
        Message("system", "s"),
        Message("assistant", "", None, (ToolCall("bash", {"in_place": 1}),)),
        Message("tool", '{"exit_code":0}', tool_call_id=""),
    )
    assert snake.tools[0].parameters == {"min_items": 1}  # already JSON schema: left as it is
    assert snake.tools[1].parameters == {
        "type": "object",
        "properties": {"old_text": {"anyOf": [{"type": "string"}], "minLength": 1}},
    }
    assert (snake.max_tokens, snake.stop, snake.wants) == (5, ("x",), {wire.THOUGHTS})
    assert snake.extra == {"safetySettings": []}


@pytest.mark.parametrize(
    ("given_model", "read_model"), [("policy", "policy"), ("models/gemini-2.5-pro", "gemini-2.5-pro")]
)
def test_the_model_is_in_the_path(given_model: str, read_model: str) -> None:
    assert parse({"model": given_model}, model="models/other").model == read_model


CONFIG_REFUSED: list[tuple[str, Any]] = [
    ("candidateCount", 2),
    ("responseMimeType", "application/json"),
    ("responseSchema", {"type": "OBJECT"}),
    ("responseJsonSchema", {"type": "object"}),
    ("responseFormat", [{"type": "text"}]),
    ("responseModalities", ["TEXT", "IMAGE"]),
    ("presencePenalty", 0.5),
    ("frequencyPenalty", -1),
    ("responseLogprobs", True),
    ("logprobs", 5),
    ("speechConfig", {"languageCode": "en"}),
    ("imageConfig", {}),
    ("routingConfig", {}),
    ("audioTimestamp", True),
    ("translationConfig", {}),
    ("neverHeardOf", 0),
]


@pytest.mark.parametrize(("field", "value"), CONFIG_REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(generationConfig={field: value})
    assert error.param == f"generationConfig.{field}"
    assert error.param in str(error)
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value"), [("cachedContent", "cachedContents/1"), ("continuationToken", "t"), ("neverHeardOf", 0)]
)
def test_so_is_what_stands_beside_it(field: str, value: Any) -> None:
    assert refusal(**{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidateCount", 1),
        ("responseMimeType", "text/plain"),
        ("responseModalities", ["TEXT"]),
        ("presencePenalty", 0.0),
        ("mediaResolution", "MEDIA_RESOLUTION_LOW"),
        ("neverHeardOf", None),
    ],
)
def test_harmless_fields_are_recorded(field: str, value: Any) -> None:
    assert parse(generationConfig={field: value}).extra == {field: value}
    assert parse(labels={"a": "b"}, serviceTier="flex", store=False).extra == {
        "labels": {"a": "b"},
        "serviceTier": "flex",
        "store": False,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": ["hi"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"role": ["user"], "parts": []}]}, "contents[0].role"),
        ({"contents": [USER, {"role": "user", "parts": "hi"}]}, "contents[1].parts"),
        ({"contents": [user("hi")]}, "contents[0].parts[0]"),
        ({"contents": [{**USER, "id": "x"}]}, "contents[0].id"),
        ({"contents": [user({"text": 5})]}, "contents[0].parts[0].text"),
        ({"contents": [user({"text": "a", "functionCall": {"name": "f"}})]}, "contents[0].parts[0]"),
        ({"contents": [user(call("bash"))]}, "contents[0].parts[0]"),
        ({"contents": [user({"text": "hm", "thought": True})]}, "contents[0].parts[0]"),
        ({"contents": [model(answer("bash", {})), USER]}, "contents[0].parts[0]"),
        ({"contents": [model({"functionCall": "bash"}), USER]}, "contents[0].parts[0].functionCall"),
        ({"contents": [model({"functionCall": {"args": {}}}), USER]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [model(call("f") | {"functionCall": {"name": "f", "args": "{}"}}), USER]},
         "contents[0].parts[0].functionCall.args"),
        ({"contents": [model({"functionCall": {"name": "f", "partialArgs": [{}]}}), USER]},
         "contents[0].parts[0].functionCall.partialArgs"),
        ({"contents": [user(answer("f", "text"))]}, "contents[0].parts[0].functionResponse.response"),
        ({"contents": [user(answer("f", {}, parts=[{"inlineData": {}}]))]},
         "contents[0].parts[0].functionResponse.parts"),
        ({"systemInstruction": 5}, "systemInstruction.parts"),
        ({"systemInstruction": {"text": "s"}}, "systemInstruction.text"),
        ({"systemInstruction": [{"inlineData": {}}]}, "systemInstruction.parts[0]"),
        ({"systemInstruction": {"parts": [{"text": "s"}, call("f")]}}, "systemInstruction.parts[1]"),
        ({"tools": {}}, "tools"),
        ({"tools": ["bash"]}, "tools[0]"),
        ({"tools": [{"functionDeclarations": {}}]}, "tools[0].functionDeclarations"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": [1]}]}]},
         "tools[0].functionDeclarations[0].parameters"),
        ({"tools": [{"functionDeclarations": [{"name": "f", "strict": True}]}]},
         "tools[0].functionDeclarations[0].strict"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": ["AUTO"]}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["f"]}}},
         "toolConfig.functionCallingConfig.allowedFunctionNames"),
        ({"toolConfig": {"includeServerSideToolInvocations": True}}, "toolConfig.includeServerSideToolInvocations"),
        ({"generationConfig": []}, None),
        ({"generationConfig": [1]}, "generationConfig"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"temperature": 2.5}}, "generationConfig.temperature"),
        ({"generationConfig": {"topP": -0.1}}, "generationConfig.topP"),
        ({"generationConfig": {"topK": True}}, "generationConfig.topK"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"maxOutputTokens": 1.5}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"seed": "one"}}, "generationConfig.seed"),
        ({"generationConfig": {"stopSequences": [3]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"thinkingConfig": 1}}, "generationConfig.thinkingConfig"),
        ({"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}},
         "generationConfig.thinkingConfig.includeThoughts"),
        ({"generationConfig": {"thinkingConfig": {"mood": 1}}}, "generationConfig.thinkingConfig.mood"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(fields: Json, param: str | None) -> None:
    if param is None:
        assert parse(**fields).extra == {}
    else:
        error = refusal(**fields)
        assert error.param == param
        assert param in wire.render_error(error)["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["inlineData", "file_data", "executableCode", "codeExecutionResult", "toolCall", "new"]
)
def test_images_and_the_like_are_refused(kind: str) -> None:
    for role in ("user", "model"):
        error = refusal(contents=[{"role": role, "parts": [{"text": "see"}, {kind: {}}]}, USER])
        assert error.param == "contents[0].parts[1]"
        assert wire.camel(dict.fromkeys([kind])).popitem()[0] in str(error)


@pytest.mark.parametrize(
    "kind", ["googleSearch", "google_search_retrieval", "codeExecution", "urlContext", "computerUse", "mcpServers"]
)
def test_tools_that_run_at_the_servers_are_refused(kind: str) -> None:
    error = refusal(tools=[{"functionDeclarations": [BASH]}, {kind: {}}])
    assert error.param == f"tools[1].{''.join(wire.camel({kind: 0}))}"


@pytest.mark.parametrize("alt", ["proto", "media"])
def test_other_forms_of_an_answer_are_refused(alt: str) -> None:
    assert refusal({"alt": alt}).param == "alt"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"contents": NaN}', b"\xff\xfe", b'{"a":' * 3000])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    for read_body in (wire.parse_request, wire.parse_count_request):
        with pytest.raises(WireError) as caught:
            read_body(body, {"model": "policy"})
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_an_answer_cannot_be_begun_for_the_model() -> None:
    error = refusal(contents=[USER, model({"text": "Sure, "})])
    assert (error.param, error.status) == ("contents", 400)
    assert str(error) == "Please ensure that multiturn requests ends with a user role or a function response."


@pytest.mark.parametrize(
    ("mode", "offered"), [("AUTO", 1), ("VALIDATED", 1), ("MODE_UNSPECIFIED", 1), (None, 1), ("NONE", 0)]
)
def test_calls_are_the_models_choice_or_none(mode: str | None, offered: int) -> None:
    config = {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": []}}
    assert len(parse(tools=[{"functionDeclarations": [BASH]}], toolConfig=config).tools) == offered


@pytest.mark.parametrize("system", ["be brief", [{"text": "be brief"}], {"parts": {"text": "be brief"}}])
def test_a_system_instruction_has_many_forms(system: Any) -> None:
    assert parse(systemInstruction=system).messages[0] == Message("system", "be brief")


@pytest.mark.parametrize("system", [None, "", [], {}, {"parts": []}, {"parts": [{"text": ""}]}])
def test_an_empty_system_instruction_is_none(system: Any) -> None:
    assert parse(systemInstruction=system).messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("openapi", "json_schema"),
    [
        (None, {}),
        (
            {
                "type": "OBJECT",
                "properties": {
                    "type": {"type": "STRING", "enum": ["A", "B"], "format": "enum"},
                    "items": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int64"}, "minItems": "1"},
                    "any_of": {"anyOf": [{"type": "STRING"}, {"type": "NUMBER"}], "nullable": True},
                    "maybe": {"type": "STRING", "nullable": True, "maxLength": 9},
                    "never": {"type": "BOOLEAN", "nullable": False},
                    "more": {"type": "OBJECT", "additionalProperties": {"type": "STRING"}},
                    "any": {"type": "TYPE_UNSPECIFIED", "nullable": True, "default": {"type": "STRING"}},
                },
                "required": ["type"],
            },
            {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "enum": ["A", "B"], "format": "enum"},
                    "items": {"type": "array", "items": {"type": "integer", "format": "int64"}, "minItems": 1},
                    "any_of": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
                    "maybe": {"type": ["string", "null"], "maxLength": 9},
                    "never": {"type": "boolean"},
                    "more": {"type": "object", "additionalProperties": {"type": "string"}},
                    "any": {"default": {"type": "STRING"}},
                },
                "required": ["type"],
            },
        ),
        (SCHEMA, SCHEMA),
    ],
)
def test_a_tool_is_the_same_in_both_kinds_of_schema(openapi: Json | None, json_schema: Json) -> None:
    def tool(**parameters: Any) -> ToolSpec:
        declared = {
            "name": "f",
            "description": "d",
            "behavior": "BLOCKING",
            "response": {"type": "STRING"},
            **parameters,
        }
        return parse(tools=[{"functionDeclarations": [declared]}]).tools[0]

    assert tool(parameters=openapi) == tool(parametersJsonSchema=json_schema) == ToolSpec("f", "d", json_schema)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": "r"}, "r"),
        ({"error": "no such file"}, "no such file"),
        ({"output": ""}, ""),
        ({"output": {"a": [1, "ü"]}}, '{"a":[1,"ü"]}'),
        ({"result": None}, "null"),
        ({"output": "x", "exit_code": 1}, '{"output":"x","exit_code":1}'),
        ({"content": [{"type": "text", "text": "t"}]}, '{"content":[{"type":"text","text":"t"}]}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_the_text_of_a_function_response(response: Any, text: str) -> None:
    assert read(user(answer("bash", response)))[0] == Message("tool", text, tool_call_id="")


def test_responses_and_text_stay_in_order() -> None:
    parts = [{"text": "one"}, answer("a", {"output": "1"}), answer("b", {"output": "2"}), {}, {"text": "two"},
             {"text": "three"}, answer("a", {"output": "3"}), {"text": ""}]  # fmt: skip
    assert read(user(*parts)) == (
        Message("user", "one"),
        Message("tool", "1", tool_call_id=""),
        Message("tool", "2", tool_call_id=""),
        Message("user", "two\nthree"),
        Message("tool", "3", tool_call_id=""),
    )


def test_empty_parts_are_tolerated() -> None:
    empty = [{"role": "user"}, user(), user({}), user({"text": ""})]
    assert read(*empty) == (Message("user"),) * 4
    for content in ({"role": "model"}, model(), model({"text": ""}), model({"thoughtSignature": "bm8="})):
        assert read(USER, content) == (Message("user", "hi"), Message("assistant"))


def test_responses_without_ids_answer_calls_in_order() -> None:
    sampled = Message("assistant", "", None, tuple(ToolCall(n, {"i": i}, f"call7x{i}") for i, n in enumerate("aba")))
    parts = [{"functionCall": {"name": c.name, "args": c.arguments}} for c in sampled.tool_calls]
    parts[0]["thoughtSignature"] = signature_of(sampled)
    echoed = read(
        model(*parts),
        user(answer("a", {"output": "0"}), answer("c", {"output": "-"})),
        user(answer("b", {"output": "1"}), answer("a", {"output": "2"}), answer("a", {"output": "-"})),
    )
    assert echoed[0] == sampled
    assert [(m.content, m.tool_call_id) for m in echoed[1:]] == [
        ("0", "call7x0"), ("-", ""), ("1", "call7x1"), ("2", "call7x2"), ("-", ""),
    ]  # fmt: skip


def test_responses_with_ids_may_come_in_any_order() -> None:
    calls = [{"functionCall": {"id": i, "name": "f", "args": {}}} for i in ("x", "y", "z")]
    echoed = read(model(*calls), user(*(answer("f", {"output": i}, id=i) for i in ("z", "x")), answer("f", {})))
    assert [m.tool_call_id for m in echoed[1:]] == ["z", "x", "y"]
    assert read(user(answer("f", {}, id="elsewhere")))[0].tool_call_id == "elsewhere"


def test_chunks_of_a_streamed_answer_are_one_turn() -> None:
    """The official clients' chats keep each chunk as a content of its own."""
    sampled = Message("assistant", "I look.", "hm", (ToolCall("a", {}, "call7x0"), ToolCall("b", {}, "call7x1")))
    chunks = stream(reply(sampled, _params=STREAM))
    contents = [c["candidates"][0]["content"] for c in chunks]
    for content in contents:
        for part in content["parts"]:
            part.get("functionCall", {}).pop("id", None)
    assert len(contents) == 3
    assert read(USER, *contents, user(answer("b", {"output": "1"}))) == (
        Message("user", "hi"), sampled, Message("tool", "1", tool_call_id="call7x1"),
    )  # fmt: skip


MESSAGES = {
    "text": Message("assistant", "Hello."),
    "nothing": Message("assistant", ""),
    "call": Message("assistant", "", None, (ToolCall("bash", {"command": "ls -la"}, "call7x0"),)),
    "parallel": Message(
        "assistant", "Both.", None, (ToolCall("bash", {"command": "ls"}, "call7x0"), ToolCall("read", {}, "call7x1"))
    ),
    "reasoning": Message("assistant", "Yes.", "Because.", ()),
    "only reasoning": Message("assistant", "", "Because.", ()),
    "all": Message("assistant", "Yes.", "Because.", (ToolCall("bash", {"n": 1.5}, "call7x0"),)),
    "broken": Message("assistant", "", None, (ToolCall("bash", '{"command": "l', "call7x0"),)),
    "unicode": Message(
        "assistant", "żółć \U0001f600 \x00\n\r\u2028", "???>>>~~~", (ToolCall("ü", {"ß": ["\u2028"]}, "c"),)
    ),
}


def stream(answered: Reply) -> list[Json]:
    """The chunks of a stream, in either form."""
    pieces = [*wire.stream_deltas(answered), *wire.stream_end(answered)]
    if wire.stream_type(answered.request) == b"application/json":
        chunks: list[Json] = orjson.loads(b"".join(pieces))
        return chunks
    assert all(p.startswith(b"data: ") and p.endswith(b"\n\n") and p.count(b"\n") == 2 for p in pieces)
    return [orjson.loads(p[6:]) for p in pieces]


def test_golden_reply() -> None:
    answered = reply(MESSAGES["all"], **thoughts())
    signature = base64.b64encode(b'clawgym1:{"ids":["call7x0"],"reasoning":"Because."}').decode()
    assert wire.render_reply(answered) == {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "Because.", "thought": True},
                        {"text": "Yes."},
                        {
                            "functionCall": {"id": "call7x0", "name": "bash", "args": {"n": 1.5}},
                            "thoughtSignature": signature,
                        },
                    ],
                },
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 11,
            "candidatesTokenCount": 5,
            "totalTokenCount": 16,
            "cachedContentTokenCount": 3,
        },
        "modelVersion": "policy",
        "responseId": "resp_7",
    }


def test_golden_replies_without_calls() -> None:
    def parts(name: str, **asked: Any) -> Any:
        body = wire.render_reply(reply(MESSAGES[name], "length", cached=0, **asked))
        assert body["candidates"][0]["finishReason"] == "MAX_TOKENS"
        assert "cachedContentTokenCount" not in body["usageMetadata"]
        return body["candidates"][0]["content"]["parts"]

    signature = base64.b64encode(b'clawgym1:{"ids":[],"reasoning":"Because."}').decode()
    assert parts("text") == [{"text": "Hello."}]
    assert parts("nothing") == [{"text": ""}]
    assert parts("reasoning") == [{"text": "Yes.", "thoughtSignature": signature}]
    assert parts("only reasoning", **thoughts()) == [
        {"text": "Because.", "thought": True},
        {"text": "", "thoughtSignature": signature},
    ]
    assert parts("broken")[0]["functionCall"]["args"] == {RAW_ARGUMENTS: '{"command": "l'}


@pytest.mark.parametrize("alt", ["sse", "json", ""])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", list(MESSAGES))
def test_streamed_equals_unstreamed(name: str, finish: str, alt: str) -> None:
    answered = reply(MESSAGES[name], finish, _params={**STREAM, "alt": alt}, **thoughts())
    whole = types.GenerateContentResponse.model_validate(wire.render_reply(answered))
    chunks = [types.GenerateContentResponse.model_validate(c) for c in stream(answered)]
    assert whole.candidates is not None
    parts = []
    for i, chunk in enumerate(chunks):
        assert chunk.candidates is not None and chunk.candidates[0].content is not None
        assert chunk.candidates[0].content.parts and len(chunk.candidates[0].content.parts) == 1
        parts += chunk.candidates[0].content.parts
        last = i == len(chunks) - 1
        assert (chunk.candidates[0].finish_reason == whole.candidates[0].finish_reason) is last
        assert chunk.usage_metadata == (whole.usage_metadata if last else None)
        assert (chunk.response_id, chunk.model_version) == (whole.response_id, whole.model_version)
    assert whole.candidates[0].content is not None
    assert parts == whole.candidates[0].content.parts


def test_an_array_grows_by_elements() -> None:
    answered = reply(MESSAGES["parallel"], _params={"method": "streamGenerateContent"})
    deltas, end = list(wire.stream_deltas(answered)), list(wire.stream_end(answered))
    assert wire.stream_type(answered.request) == b"application/json"
    assert [d[:2] for d in deltas] == [b"[{", b"\n,"] and end[-1] == b"]"
    for so_far in (deltas[:1], deltas):
        assert orjson.loads(b"".join([wire.keep_alive(answered.request), *so_far, b"]"]))
    single = reply(MESSAGES["text"], _params={"method": "streamGenerateContent"})
    assert list(wire.stream_deltas(single)) == []


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("wanted", [False, True], ids=["", "thoughts wanted"])
@pytest.mark.parametrize("name", list(MESSAGES))
def test_an_echo_is_the_message(name: str, wanted: bool, finish: str) -> None:
    body = wire.render_reply(reply(MESSAGES[name], finish, **(thoughts() if wanted else {})))
    assert read(USER, body["candidates"][0]["content"])[1] == MESSAGES[name]


def test_signatures_of_others_are_ignored() -> None:
    ours = Message("assistant", "", "hm", (ToolCall("f", {}, "call7x0"),))
    prefix = b"clawgym1:"
    foreign = [b"", b"random", prefix, prefix + b"{", prefix + b"[]", prefix + b'{"ids":1,"reasoning":null}',
               prefix + b'{"ids":[1],"reasoning":null}', prefix + b'{"ids":[],"reasoning":1}', b"\xff" * 9]  # fmt: skip
    for text in [
        *(base64.b64encode(f).decode() for f in foreign),
        "skip_thought_signature_validator",
        "ü",
        "a",
        5,
        None,
    ]:
        assert read_signature(text) is None
        echoed = read(USER, model(call("f", {"thoughtSignature": text} if text != 5 else {})))
        assert echoed[1] == Message("assistant", "", None, (ToolCall("f", {}),))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        sent = encode(base64.b64decode(signature_of(ours))).decode()
        assert read_signature(sent) == read_signature(sent.rstrip("=")) == (["call7x0"], "hm")


def test_echoed_ids_and_thoughts_win() -> None:
    ours = Message("assistant", "", "hm", (ToolCall("f", {}, "call7x0"), ToolCall("f", {}, "call7x1")))
    first = {"functionCall": {"name": "f", "id": "other"}, "thoughtSignature": signature_of(ours)}
    assert read(USER, model({"text": "cut", "thought": True}, first, call("f"), call("f")))[1] == Message(
        "assistant", "", "cut", (ToolCall("f", {}, "other"), ToolCall("f", {}, "call7x1"), ToolCall("f", {}))
    )


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda v: st.lists(v, max_size=2) | st.dictionaries(TEXT, v, max_size=2),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, VALUES, max_size=2) | TEXT), max_size=3).map(
    lambda made: tuple(ToolCall(n, a, f"call7x{i}") for i, (n, a) in enumerate(made))
)


@given(
    message=st.builds(Message, st.just("assistant"), TEXT, st.none() | TEXT.filter(bool), CALLS),
    keep_ids=st.booleans(),
    keep_thoughts=st.booleans(),
    streamed=st.booleans(),
)
def test_whatever_an_sdk_drops_the_message_comes_back(
    message: Message, keep_ids: bool, keep_thoughts: bool, streamed: bool
) -> None:
    answered = reply(message, _params=STREAM if streamed else None, **thoughts())
    responses = stream(answered) if streamed else [wire.render_reply(answered)]
    contents = []
    for response in responses:
        parsed = types.GenerateContentResponse.model_validate(response)
        assert parsed.candidates is not None and parsed.candidates[0].content is not None
        content = parsed.candidates[0].content
        content.parts = [p for p in content.parts or [] if keep_thoughts or not p.thought]
        for part in content.parts:
            if part.function_call is not None and not keep_ids:
                part.function_call.id = None
        contents.append(content.model_dump(mode="json", exclude_none=True))
    assert read(USER, *contents)[1] == message


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"), (401, "UNAUTHENTICATED"), (403, "PERMISSION_DENIED"), (404, "NOT_FOUND"),
        (405, "INVALID_ARGUMENT"), (410, "NOT_FOUND"), (429, "RESOURCE_EXHAUSTED"), (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)  # fmt: skip
def test_errors(status: int, name: str) -> None:
    body = wire.render_error(WireError("bad", status=status))
    assert body == {"error": {"code": status, "message": "bad", "status": name}}


def test_errors_name_their_field() -> None:
    error = wire.render_error(refusal(contents=[user({"inlineData": {}})]))["error"]
    assert error["message"].startswith("contents[0].parts[0]: ")
    assert error["details"][0]["fieldViolations"][0]["field"] == "contents[0].parts[0]"
    error = wire.render_error(refusal(cachedContent="c"))["error"]
    assert error["message"].startswith("cachedContent cannot be honoured")


def test_errors_in_a_stream() -> None:
    error = WireError("engine failed", status=500)
    (event,) = wire.stream_error(error, parse(STREAM))
    assert event == b"data: " + orjson.dumps(wire.render_error(error)) + b"\n\n"
    (array,) = wire.stream_error(error, parse({"method": "streamGenerateContent"}))
    assert orjson.loads(array) == [wire.render_error(error)]
    cut = reply(MESSAGES["parallel"], _params={"method": "streamGenerateContent"})
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(b"".join([*wire.stream_deltas(cut), array]))


def test_overflow_is_told_as_harnesses_know_it() -> None:
    error = wire.overflow(ContextOverflow(5000, 4096))
    assert str(error) == "The input token count (5000) exceeds the maximum number of tokens allowed (4096)."
    assert wire.render_error(error)["error"] == {"code": 400, "message": str(error), "status": "INVALID_ARGUMENT"}


def test_counting_reads_a_request_or_its_contents() -> None:
    params = {"model": "models/policy", "method": "countTokens"}
    fields: Json = {"contents": [USER, model({"text": "so far"})], "systemInstruction": "s"}
    for body in (fields, {"generateContentRequest": {"model": "models/policy", **fields}}):
        request = wire.parse_count_request(orjson.dumps(body), params)
        assert request.messages == (Message("system", "s"), Message("user", "hi"), Message("assistant", "so far"))
        assert (request.model, request.stream) == ("policy", False)
    with pytest.raises(WireError) as caught:
        wire.parse_count_request(b"{}", params)
    assert caught.value.param == "contents"
    assert wire.render_token_count(12) == {"totalTokens": 12}


def test_models() -> None:
    only = wire.render_model("policy", 4096)
    assert only == wire.render_model("models/policy", 4096)
    assert only == {
        "name": "models/policy",
        "version": "1",
        "displayName": "policy",
        "inputTokenLimit": 4096,
        "outputTokenLimit": 4096,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
