"""Gemini's generateContent as JSON: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from clawgym_env.errors import WireError
from clawgym_env.types import Message, ToolCall, ToolSpec
from clawgym_env.wire import gemini as wire
from clawgym_env.wire.gemini_contents import signature_of
from tests.wires.gemini import BASH, SCHEMA, STREAM, USER, Json, answer, call, model, parse, read, refusal, user


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
        Message("tool", "x", tool_call_id="c1", is_error=True),
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
    failed = response == {"error": text}
    assert read(user(answer("bash", response)))[0] == Message("tool", text, tool_call_id="", is_error=failed)


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
