"""Gemini's generateContent as JSON: one message however it is sent and echoed, and what is said of errors."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import Message, ToolCall
from clawgym_env.wire import gemini as wire
from clawgym_env.wire.base import RAW_ARGUMENTS, Reply
from clawgym_env.wire.gemini_contents import read_signature, signature_of
from tests.wires.gemini import STREAM, USER, Json, answer, call, model, parse, read, refusal, reply, thoughts, user

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


@pytest.mark.parametrize("name", list(MESSAGES))
def test_an_error_after_an_answers_pieces_is_the_last_of_the_array(name: str) -> None:
    error, cut = WireError("has ended", status=410), reply(MESSAGES[name], _params={"method": "streamGenerateContent"})
    pieces = list(wire.stream_deltas(cut))
    told = orjson.loads(b"".join([*pieces, *wire.stream_error(error, cut.request, cut)]))
    assert len(told) == len(pieces) + 1 and told[-1] == wire.render_error(error)
    assert all("candidates" in piece for piece in told[:-1])


def test_overflow_is_told_as_harnesses_know_it() -> None:
    error = wire.overflow(ContextOverflow(5000, 4096))
    assert str(error) == "The input token count (5000) exceeds the maximum number of tokens allowed (4095)."
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
