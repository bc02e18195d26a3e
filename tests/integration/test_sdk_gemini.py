"""The official Gemini client against the model boundary, over a real socket, as its users write their loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from google import genai
from google.genai import errors, types

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import StepwiseEngine
from clawgym_env.errors import EngineError
from clawgym_env.proxy import exchange
from clawgym_env.proxy.session import Session
from clawgym_env.tree.pack import pack
from clawgym_env.types import Budget, ToolCall
from tests.proxy_world import RENDERER, World, call, letters, raw, run

Json = dict[str, Any]
Ask = Callable[..., Awaitable[types.GenerateContentResponse]]
SYSTEM = "You are an agent."
START = "List the files."
TOOLS: list[Any] = [
    {
        "function_declarations": [
            {
                "name": "bash",
                "description": "run",
                "parameters": {
                    "type": "OBJECT",
                    "properties": {"command": {"type": "STRING"}},
                    "required": ["command"],
                },
            }
        ]
    }
]
CONFIG: Json = {
    "system_instruction": SYSTEM,
    "tools": TOOLS,
    "automatic_function_calling": {"disable": True},
    "thinking_config": {"include_thoughts": True, "thinking_budget": 1024},
    "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
}
THOUGHT = RENDERER.encode_reply("Looking.", ToolCall("bash", {"command": "ls -la"}), reasoning="Files first.")
BOTH_CALLS = raw(
    'Two.\n<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "b"}}\n</tool_call><|im_end|>'
)


@asynccontextmanager
async def client(it: World, rollout: str = "r1") -> AsyncIterator[genai.Client]:
    """A rollout's client; loading the certificates would take longer than most tests."""
    plain = {"verify": False}
    options = types.HttpOptions(
        base_url=f"{it.server.base_url}/rollout/{rollout}", timeout=20_000, client_args=plain, async_client_args=plain
    )
    sdk = genai.Client(api_key="x", http_options=options)
    try:
        yield sdk
    finally:
        await sdk.aio.aclose()
        sdk.close()


def asked(contents: Any, config: Json) -> Json:
    return {"model": "policy", "contents": contents, "config": {**CONFIG, **config}}


def joined(chunks: list[types.GenerateContentResponse]) -> types.GenerateContentResponse:
    """What a user of the stream has at its end: all parts, and what the last chunk says."""
    whole = chunks[-1].model_copy(deep=True)
    assert whole.candidates and whole.candidates[0].content
    whole.candidates[0].content.parts = [p for c in chunks for p in c.parts or []]
    assert [c.candidates[0].finish_reason for c in chunks[:-1] if c.candidates] == [None] * (len(chunks) - 1)
    return whole


async def whole(it: World, contents: Any, **config: Any) -> types.GenerateContentResponse:
    async with client(it) as sdk:
        return await sdk.aio.models.generate_content(**asked(contents, config))


async def streamed(it: World, contents: Any, **config: Any) -> types.GenerateContentResponse:
    async with client(it) as sdk:
        stream = await sdk.aio.models.generate_content_stream(**asked(contents, config))
        return joined([chunk async for chunk in stream])


async def whole_sync(it: World, contents: Any, **config: Any) -> types.GenerateContentResponse:
    async with client(it) as sdk:
        return await asyncio.to_thread(sdk.models.generate_content, **asked(contents, config))


async def streamed_sync(it: World, contents: Any, **config: Any) -> types.GenerateContentResponse:
    async with client(it) as sdk:
        return joined(
            await asyncio.to_thread(lambda: list(sdk.models.generate_content_stream(**asked(contents, config))))
        )


async def array(it: World, contents: Any, **config: Any) -> types.GenerateContentResponse:
    """As a plain HTTP client has it that does not ask for events: one JSON array, here with the thoughts left out."""
    listed = contents if isinstance(contents, list) else [types.Content(role="user", parts=[types.Part(text=contents)])]
    body = {
        "contents": [c.model_dump(mode="json", exclude_none=True, by_alias=True) for c in listed],
        "systemInstruction": SYSTEM,
        "tools": TOOLS,
        "generationConfig": config,
    }
    response = await it.http.post(f"{url(it)}:streamGenerateContent?key=x", json=body)
    assert response.headers["content-type"] == "application/json"
    if response.status_code != 200:
        errors.APIError.raise_error(response.status_code, response.json(), None)
    for element in response.json():
        if "error" in element:
            errors.APIError.raise_error(element["error"]["code"], element, None)
    return joined([types.GenerateContentResponse.model_validate(element) for element in response.json()])


def url(it: World) -> str:
    return f"{it.server.base_url}/rollout/r1/v1beta/models/policy"


WAYS: dict[str, Ask] = {
    "whole": whole,
    "streamed": streamed,
    "whole, sync": whole_sync,
    "streamed, sync": streamed_sync,
    "array": array,
}
BOTH = pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])


def results(*outputs: str) -> list[types.Part]:
    return [types.Part.from_function_response(name="bash", response={"output": o}) for o in outputs]


def content(response: types.GenerateContentResponse) -> types.Content:
    assert response.candidates and response.candidates[0].content
    return response.candidates[0].content


def is_one_chain(session: Session, answers: list[Any]) -> None:
    """Each call continues the one before it, and every sampled id is in the tree as it was sampled."""
    assert [r.parent for r in session.records] == [None, *range(len(answers) - 1)]
    assert session.tree.leaf_calls() == [len(answers) - 1]
    packed = pack(session.tree)
    for k, answer in enumerate(answers):
        assert packed.tokens[packed.call == k].tolist() == answer.tolist()
    assert session.ledger.as_dict()["notes"] == {}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_conversation_with_tools_and_thinking_is_one_chain(way: str) -> None:
    answers = [THOUGHT, BOTH_CALLS, letters("Done: zażółć \U0001f600")]
    said: list[types.GenerateContentResponse] = []

    async def scenario(it: World) -> None:
        contents = [types.Content(role="user", parts=[types.Part(text=START)])]
        for outputs in (["a.txt"], ["A", "B"], None):
            said.append(await WAYS[way](it, contents))
            contents.append(content(said[-1]))
            if outputs is not None:
                contents.append(types.Content(role="user", parts=results(*outputs)))

    session = run(scenario, answers)
    is_one_chain(session, answers)
    assert [m.tool_call_id for r in session.records for m in r.messages if m.role == "tool"] == [
        "call1x0", "call2x0", "call2x1",
    ]  # fmt: skip
    assert session.records[0].messages[0].content == SYSTEM
    assert [r.reply.reasoning for r in session.records] == ["Files first.", None, None]

    thought = [] if way == "array" else ["Files first."]
    assert [p.text for p in said[0].parts or [] if p.thought] == thought
    assert [[(c.name, c.args, c.id) for c in s.function_calls or []] for s in said] == [
        [("bash", {"command": "ls -la"}, "call1x0")],
        [("bash", {"command": "a"}, "call2x0"), ("bash", {"command": "b"}, "call2x1")],
        [],
    ]
    texts = ["".join(p.text for p in s.parts or [] if p.text and not p.thought) for s in said]
    assert texts == ["Looking.", "Two.", "Done: zażółć \U0001f600"]
    for response, answer in zip(said, answers, strict=True):
        usage = response.usage_metadata
        assert usage is not None and usage.prompt_token_count is not None
        assert usage.candidates_token_count == len(answer)
        assert usage.total_token_count == usage.prompt_token_count + len(answer)
        assert response.candidates and response.candidates[0].finish_reason == types.FinishReason.STOP


SAYINGS = {
    "text": letters("Hello."),
    "nothing": raw("<|im_end|>"),
    "call": call("ls"),
    "text and call": call("ls", "I look."),
    "calls": BOTH_CALLS,
    "thought": RENDERER.encode_reply("Yes.", reasoning="Because."),
    "thought and call": THOUGHT,
    "broken call": raw('<tool_call>\n{"name": "bash", "arguments": "ls"}\n</tool_call><|im_end|>'),
    "half a call": raw('<tool_call>\n{"name": "bash", "arg<|im_end|>'),
    "unicode": letters("a\u2028b\u2029c\u0085d\re\nf \U0001f600"),
}


@pytest.mark.parametrize("name", list(SAYINGS))
def test_every_way_of_asking_gives_the_same_parts_and_their_echo_grafts(name: str) -> None:
    async def scenario(it: World) -> None:
        said: Json = {}
        for way, ask in WAYS.items():
            response = await ask(it, START)
            said[way] = [p.model_dump(exclude={"thought_signature"}) for p in response.parts or []]
            for part in said[way]:
                if part["function_call"] is not None:
                    part["function_call"]["id"] = part["function_call"]["id"].partition("x")[2]
            first = [types.Content(role="user", parts=[types.Part(text=START)]), content(response)]
            await ask(it, [*first, types.Content(role="user", parts=[types.Part(text="Go on.")])])
            assert it.session.records[-1].parent == len(it.session.records) - 2
        said["array"] = [p for p in said["whole"] if p["thought"]] + said["array"]
        assert all(parts == said["whole"] for parts in said.values())

    session = run(scenario, [a for _ in WAYS for a in (SAYINGS[name], letters("Fine."))])
    assert len(session.records) == 2 * len(WAYS)


@BOTH
@pytest.mark.parametrize("dropped", ["ids", "thoughts", "ids and thoughts", "signatures", "ids and signatures", "all"])
def test_what_harnesses_drop(ask: Ask, dropped: str) -> None:
    """Reasoning comes back from signatures when the thoughts are gone; the tokens come back from the tree anyway."""

    def drop(echoed: types.Content) -> types.Content:
        kept = []
        for part in echoed.parts or []:
            if part.thought and dropped in ("thoughts", "ids and thoughts", "all"):
                continue
            if part.function_call and dropped in ("ids", "ids and thoughts", "ids and signatures", "all"):
                part.function_call.id = None
            if dropped in ("signatures", "ids and signatures", "all"):
                part.thought_signature = None
            kept.append(part)
        return types.Content(role="model", parts=kept)

    answers = [THOUGHT, BOTH_CALLS, RENDERER.encode_reply("So.", reasoning="Hm."), letters("End.")]

    async def scenario(it: World) -> None:
        contents = [types.Content(role="user", parts=[types.Part(text=START)])]
        for parts in (results("a.txt"), results("A", "B"), [types.Part(text="Go on.")], None):
            contents.append(drop(content(await ask(it, contents))))
            if parts is not None:
                contents.append(types.Content(role="user", parts=parts))
        if dropped != "all":
            # What the model said once more, after another beginning: rendered from the echo alone.
            contents[0] = types.Content(role="user", parts=[types.Part(text="Another beginning.")])
            await ask(it, contents[:-1])

    session = run(scenario, [*answers, letters("x")])
    assert [r.parent for r in session.records[:4]] == [None, 0, 1, 2]
    if dropped != "all":
        said = [m for m in session.records[4].messages if m.role == "assistant"]
        assert said[2].reasoning == "Hm."
        expected = "" if dropped == "ids and signatures" else "call1x0"
        assert said[0].tool_calls[0].id == expected and said[0].reasoning == "Files first."


async def chat_whole(sdk: genai.Client, messages: list[Any], config: Json) -> list[types.Content]:
    chat = sdk.aio.chats.create(model="policy", config=config)
    for message in messages:
        await chat.send_message(message)
    return chat.get_history(curated=True)


async def chat_streamed(sdk: genai.Client, messages: list[Any], config: Json) -> list[types.Content]:
    chat = sdk.aio.chats.create(model="policy", config=config)
    for message in messages:
        async for _ in await chat.send_message_stream(message):
            pass
    return chat.get_history(curated=True)


async def chat_sync(sdk: genai.Client, messages: list[Any], config: Json) -> list[types.Content]:
    chat = sdk.chats.create(model="policy", config=config)
    for message in messages:
        await asyncio.to_thread(chat.send_message, message)
    return chat.get_history(curated=True)


async def chat_streamed_sync(sdk: genai.Client, messages: list[Any], config: Json) -> list[types.Content]:
    chat = sdk.chats.create(model="policy", config=config)
    for message in messages:
        await asyncio.to_thread(lambda m: list(chat.send_message_stream(m)), message)
    return chat.get_history(curated=True)


CHATS = pytest.mark.parametrize(
    "converse", [chat_whole, chat_streamed, chat_sync, chat_streamed_sync], ids=lambda f: f.__name__
)


@CHATS
def test_a_chat_is_one_chain(converse: Any) -> None:
    """A streamed chat keeps each chunk as a content of its own; one answer stays one turn."""
    answers = [THOUGHT, BOTH_CALLS, letters("Done."), letters("Indeed.")]

    async def scenario(it: World) -> None:
        async with client(it) as sdk:
            history = await converse(sdk, [START, results("a.txt"), results("A", "B"), "Sure?"], CONFIG)
        contents = 3 + 3 + 1 + 1 if "streamed" in converse.__name__ else 4
        assert len([c for c in history if c.role == "model"]) == contents, "the SDK kept every answer"

    is_one_chain(run(scenario, answers), answers)


@CHATS
def test_functions_that_the_sdk_calls_itself(converse: Any) -> None:
    ran: list[tuple[str, int]] = []

    def bash(command: str, times: int = 1) -> str:
        """run"""
        ran.append((command, times))
        return f"ran {command}"

    answers = [BOTH_CALLS, call("c"), letters("Done.")]

    async def scenario(it: World) -> None:
        async with client(it) as sdk:
            await converse(sdk, [START], {"system_instruction": SYSTEM, "tools": [bash]})

    session = run(scenario, answers)
    is_one_chain(session, answers)
    assert ran == [("a", 1), ("b", 1), ("c", 1)]
    assert [m.content for r in session.records for m in r.messages if m.role == "tool"] == ["ran a", "ran b", "ran c"]


def test_a_count_is_the_prompt_that_is_then_served() -> None:
    async def scenario(it: World) -> None:
        contents = [types.Content(role="user", parts=[types.Part(text=START)])]
        async with client(it) as sdk:
            for _ in range(2):
                count = await sdk.aio.models.count_tokens(model="policy", contents=contents)
                served = await sdk.aio.models.generate_content(model="policy", contents=contents)
                assert served.usage_metadata is not None
                assert count.total_tokens == served.usage_metadata.prompt_token_count
                contents += [content(served), types.Content(role="user", parts=[types.Part(text="Go on.")])]
        body = {"contents": [{"parts": [{"text": START}]}], "systemInstruction": SYSTEM, "tools": TOOLS}
        wrapped = {"generateContentRequest": {"model": "models/policy", **body}}
        counted = (await it.http.post(f"{url(it)}:countTokens", json=wrapped)).json()
        usage = (await it.http.post(f"{url(it)}:generateContent", json=body)).json()["usageMetadata"]
        assert counted == {"totalTokens": usage["promptTokenCount"]}
        refused = await it.http.post(f"{url(it)}:countTokens", json={"contents": [{"parts": [{"inlineData": {}}]}]})
        assert refused.status_code == 400 and "contents[0].parts[0]" in refused.json()["error"]["message"]

    session = run(scenario, [letters("a"), letters("b"), letters("c")])
    assert session.served == 3 and len(session.records) == 3
    assert session.ledger.notes == {"request rendered from scratch": 1}, "counts leave no trace"


def test_models_are_listed() -> None:
    async def scenario(it: World) -> None:
        async with client(it) as sdk:
            models = [m async for m in await sdk.aio.models.list()]
            assert [m.name for m in models] == ["models/policy"]
            assert models[0].input_token_limit == it.engine.max_context
            assert models[0].supported_actions == ["generateContent", "countTokens"]
            assert (await sdk.aio.models.get(model="gemini-any")).name == "models/gemini-any"

    session = run(scenario, [])
    assert session.served == 0 and session.ledger.notes == {}


@pytest.mark.parametrize("ask", [whole, streamed, streamed_sync], ids=["whole", "streamed", "streamed, sync"])
def test_refusals_are_the_sdks_own_errors(ask: Ask) -> None:
    image = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
    schema = {"response_mime_type": "application/json", "response_schema": {"type": "OBJECT"}}
    cases: list[tuple[Any, Json, str]] = [
        ([types.Content(role="user", parts=[types.Part(text=START)]),
          types.Content(role="model", parts=[types.Part(text="The")])], {}, "ends with a user role"),
        ([types.Content(role="user", parts=[types.Part(text="see"), image])], {}, "contents[0].parts[1]"),
        (START, schema, "generationConfig.responseMimeType"),
        (START, {"candidate_count": 2}, "generationConfig.candidateCount"),
        (START, {"cached_content": "cachedContents/1"}, "cachedContent"),
        (START, {"tools": [{"google_search": {}}]}, "tools[0].googleSearch"),
        (START, {"tool_config": {"function_calling_config": {"mode": "ANY"}}}, "functionCallingConfig.mode"),
    ]  # fmt: skip

    async def scenario(it: World) -> None:
        for contents, config, words in cases:
            with pytest.raises(errors.ClientError) as caught:
                await ask(it, contents, **config)
            assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
            assert caught.value.message is not None and words in caught.value.message

    session = run(scenario, [])
    assert session.records == [] and sum(session.ledger.notes.values()) == len(cases)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_prompt_past_the_context_is_told_as_harnesses_know_it(way: str) -> None:
    async def scenario(it: World) -> None:
        with pytest.raises(
            errors.ClientError, match=r"The input token count \(\d+\) exceeds the maximum number .* \(39\)"
        ):
            await WAYS[way](it, START)

    session = run(scenario, [letters("a")], max_context=40)
    assert session.records == [] and not session.failed.is_set()


@BOTH
def test_a_met_budget_and_an_unknown_rollout(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        await ask(it, START)
        with pytest.raises(errors.ClientError, match="budget of 1 calls"):
            await ask(it, START)
        async with client(it, "r2") as sdk:
            with pytest.raises(errors.ClientError, match="no rollout 'r2'") as caught:
                await sdk.aio.models.generate_content(model="policy", contents=START)
        assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")

    assert len(run(scenario, [letters("a")] * 2, budget=Budget(max_calls=1)).records) == 1


@pytest.mark.parametrize("way", list(WAYS))
def test_a_failing_engine_is_a_server_error_wherever_it_shows(way: str) -> None:
    """In a stream it comes after the headers: the SDK must raise, not take it for an answer."""

    class Failing(ScriptedEngine):
        async def generate(self, request: EngineRequest) -> Any:
            await asyncio.sleep(0.05)
            raise EngineError("out of memory")

    async def scenario(it: World) -> None:
        with pytest.raises(errors.ServerError, match="out of memory") as caught:
            await WAYS[way](it, START)
        assert (caught.value.code, caught.value.status) == (500, "INTERNAL")

    session = run(scenario, Failing(lambda *_: letters("a")))
    assert session.records == [] and session.failed.is_set()


@pytest.mark.parametrize("way", list(WAYS))
def test_a_truncated_answer_says_max_tokens(way: str) -> None:
    async def scenario(it: World) -> None:
        config = {"maxOutputTokens": 3} if way == "array" else {"max_output_tokens": 3}
        response = await WAYS[way](it, START, **config)
        assert response.candidates and response.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS
        assert response.text == "abc" and response.usage_metadata
        assert response.usage_metadata.candidates_token_count == 3

    assert run(scenario, [letters("abcdef")]).records[0].call.finish_reason == "length"


@BOTH
def test_a_stop_sequence_ends_the_answer(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        response = await ask(it, START, stop_sequences=["never", "END"])
        assert response.text == "abc"
        assert response.candidates and response.candidates[0].finish_reason == types.FinishReason.STOP

    run(scenario, [letters("abcENDdef")])


@pytest.mark.parametrize("way", ["streamed", "streamed, sync", "array"])
def test_empty_lines_keep_a_waiting_stream_open(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)

    async def scenario(it: World) -> None:
        asking = asyncio.ensure_future(WAYS[way](it, START))
        pending = await it.stepwise.next_call()
        await asyncio.sleep(0.1)
        it.stepwise.answer(pending, call("ls", "At last."))
        response = await asking
        assert [bool(p.function_call) for p in response.parts or []] == [False, True]

        body = {"contents": [{"parts": [{"text": START}]}]}
        form = "" if way == "array" else "?alt=sse"
        request: asyncio.Task[httpx.Response] = asyncio.create_task(
            it.http.post(f"{url(it)}:streamGenerateContent{form}", json=body)
        )
        pending = await it.stepwise.next_call()
        await asyncio.sleep(0.1)
        it.stepwise.answer(pending, letters("Again."))
        raw_text = (await request).text
        waited = len(raw_text) - len(raw_text.lstrip("\n"))
        assert waited >= 2
        assert raw_text.lstrip("\n").startswith("[{" if way == "array" else "data: {")
        if way == "array":
            assert orjson.loads(raw_text)[-1]["candidates"][0]["finishReason"] == "STOP"

    session: Session = run(scenario, StepwiseEngine(max_context=4096))
    assert len(session.records) == 2
