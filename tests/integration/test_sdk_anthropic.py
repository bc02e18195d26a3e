"""The official Anthropic client against the model boundary, over a real socket, as its users write their loops."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import numpy as np
import orjson
import pytest
from anthropic.types import Message

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import StepwiseEngine
from clawgym_env.errors import EngineError
from clawgym_env.proxy import exchange
from clawgym_env.proxy.session import Session
from clawgym_env.tree.pack import pack
from clawgym_env.types import Budget, ToolCall
from tests.proxy_world import RENDERER, STOP, World, call, letters, raw, run

Json = dict[str, Any]
Ask = Callable[..., Awaitable[Message]]
TOOLS: list[Any] = [{"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {}}}]
SYSTEM = "You are an agent."
START: list[Any] = [{"role": "user", "content": "List the files."}]
ASK: Json = {"model": "claude-any", "max_tokens": 512, "system": SYSTEM, "tools": TOOLS}
IMAGE: Any = {
    "role": "user",
    "content": [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}],
}
THOUGHT = RENDERER.encode_reply("Looking.", ToolCall("bash", {"command": "ls -la"}), reasoning="Files first.")


@asynccontextmanager
async def client(it: World, rollout: str | None = None) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The asynchronous client of a rollout; loading the certificates would take longer than most tests."""
    base = f"{it.server.base_url}/rollout/{rollout or it.session.rollout_id}"
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=0, timeout=20, http_client=http) as sdk:
        yield sdk


async def whole(it: World, **fields: Any) -> Message:
    async with client(it) as sdk:
        message: Message = await sdk.messages.create(**{**ASK, **fields})
        return message


async def streamed(it: World, **fields: Any) -> Message:
    async with client(it) as sdk, sdk.messages.stream(**{**ASK, **fields}) as stream:
        return await stream.get_final_message()


async def events(it: World, **fields: Any) -> Message:
    """By hand from the raw events, as harnesses do that do not use the SDK's helper."""
    async with client(it) as sdk:
        seen = [e async for e in await sdk.messages.create(**{**ASK, **fields}, stream=True)]
    message: Json = {}
    for event in seen:
        data = event.to_dict()
        match data["type"]:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                message["content"].append(data["content_block"])
            case "content_block_delta":
                delta, block = data["delta"], message["content"][data["index"]]
                for key in delta.keys() - {"type"}:
                    value = delta[key]
                    block.update({"input": orjson.loads(value)} if key == "partial_json" else {key: value})
            case "message_delta":
                message.update(data["delta"])
                message["usage"].update(data["usage"])
    assert [e.type for e in seen][-2:] == ["message_delta", "message_stop"]
    return Message.model_validate(message)


def threaded(stream: bool) -> Ask:
    def ask(base: str, fields: Json) -> Message:
        http = anthropic.DefaultHttpxClient(verify=False)
        with anthropic.Anthropic(base_url=base, api_key="x", max_retries=0, timeout=20, http_client=http) as sdk:
            if not stream:
                return sdk.messages.create(**fields)
            with sdk.messages.stream(**fields) as events:
                return events.get_final_message()

    async def asked(it: World, **fields: Any) -> Message:
        base = f"{it.server.base_url}/rollout/{it.session.rollout_id}"
        return await asyncio.to_thread(ask, base, {**ASK, **fields})

    return asked


WAYS: dict[str, Ask] = {
    "whole": whole,
    "streamed": streamed,
    "raw events": events,
    "whole, sync": threaded(False),
    "streamed, sync": threaded(True),
}
BOTH = pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])


def results(message: Message, *contents: Any) -> Json:
    """The user message that answers a message's tool calls."""
    ids = [b.id for b in message.content if b.type == "tool_use"]
    pairs = zip(ids, contents, strict=True)
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": c} for i, c in pairs]}


def echo(message: Message) -> Json:
    return {"role": "assistant", "content": message.content}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_conversation_with_tools_and_thinking_is_one_chain(way: str) -> None:
    both = raw(
        'Two.\n<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "b"}}\n</tool_call><|im_end|>'
    )
    answers = [THOUGHT, both, letters("Done: zażółć \U0001f600")]
    said: list[Message] = []

    async def scenario(it: World) -> None:
        messages = list(START)
        for contents in (["a.txt"], ["A", [{"type": "text", "text": "B"}]], None):
            said.append(await WAYS[way](it, messages=messages))
            messages.append(echo(said[-1]))
            if contents is not None:
                messages.append(results(said[-1], *contents))

    session = run(scenario, answers)
    assert [r.parent for r in session.records] == [None, 0, 1] and session.tree.leaf_calls() == [2]
    packed = pack(session.tree)
    for k, answer in enumerate(answers):
        assert packed.tokens[packed.call == k].tolist() == answer.tolist()
    assert session.ledger.as_dict()["notes"] == {}
    assert [m.stop_reason for m in said] == ["tool_use", "tool_use", "end_turn"]
    assert [b.type for b in said[0].content] == ["thinking", "text", "tool_use"]
    assert said[0].content[0].thinking == "Files first."  # type: ignore[union-attr]
    assert [b.input for b in said[1].content if b.type == "tool_use"] == [{"command": "a"}, {"command": "b"}]
    assert said[2].content[0].text == "Done: zażółć \U0001f600"  # type: ignore[union-attr]
    for message, record in zip(said, session.records, strict=True):
        usage = message.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == record.call.prompt_tokens
        assert usage.output_tokens == record.call.sampled_tokens
    assert [m.role for m in session.records[2].messages] == ["tool", "tool"]


ANSWERS = {
    "text": letters("Hello."),
    "nothing": np.array([STOP], dtype=np.int64),
    "call": call("ls"),
    "thinking and call": THOUGHT,
    "only thinking": raw("<think>\nHm.\n</think>\n\n<|im_end|>"),
    "no JSON for everyone": raw('<tool_call>\n{"name": "bash", "arguments": {"x": NaN}}\n</tool_call><|im_end|>'),
}


@pytest.mark.parametrize("name", list(ANSWERS))
def test_every_way_of_asking_gives_the_same_message_and_its_echo_grafts(name: str) -> None:
    said: list[Json] = []

    async def scenario(it: World) -> None:
        for ask in WAYS.values():
            message = await ask(it, messages=START)
            said.append(message.to_dict())
            follow = results(message, "ok") if message.stop_reason == "tool_use" else {"role": "user", "content": "So?"}
            await ask(it, messages=[*START, echo(message), follow])

    session = run(scenario, [ANSWERS[name], letters("Yes.")] * len(WAYS))
    for message in said:
        for block in message["content"]:
            block.pop("id", None)
        assert message.pop("id").startswith("msg_")
    assert all(message == said[0] for message in said) and said[0]["content"]
    assert [r.parent for r in session.records] == [None, 0, None, 2, None, 4, None, 6, None, 8]
    assert not [note for note in session.ledger.notes if note.startswith("tolerated")]


@BOTH
def test_arguments_that_are_no_object_come_back_as_they_were(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        message = await ask(it, messages=START)
        assert message.content[-1].input == {"raw_arguments": '{"x": NaN}'}  # type: ignore[union-attr]
        error = [{**results(message, "bad arguments")["content"][0], "is_error": True}]
        await ask(it, messages=[*START, echo(message), {"role": "user", "content": error}])

    session = run(scenario, [ANSWERS["no JSON for everyone"], letters("Sorry.")])
    assert session.records[1].parent == 0 and session.ledger.notes == {}


def test_an_emptied_thinking_block_still_renders_its_reasoning() -> None:
    """The system prompt differs, so that nothing grafts and the prompt is made of what the client sent."""

    async def scenario(it: World) -> None:
        message = await whole(it, messages=START)
        blocks = [b.to_dict() for b in message.content]
        blocks[0]["thinking"] = ""
        follow = [*START, {"role": "assistant", "content": blocks}, results(message, "a.txt")]
        await whole(it, messages=follow, system="Another.")
        assert "Files first." in RENDERER.decode(it.prompts[1].prompt_ids)

    assert run(scenario, [THOUGHT, letters("Done.")]).records[1].parent is None


@BOTH
def test_a_conversation_as_claude_code_has_it_is_one_chain(ask: Ask) -> None:
    """Cache marks move, the newest message is a list and later a string, system messages stand in the list."""
    mark = {"cache_control": {"type": "ephemeral"}}

    def blocks(*texts: str) -> list[Json]:
        return [{"type": "text", "text": t, **mark} for t in texts]

    more: Json = {
        "system": blocks("You are Claude Code.", "cwd: /work"),
        "tools": [{**TOOLS[0], "eager_input_streaming": True}],
        "extra_query": {"beta": "true"},
        "extra_headers": {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
        "extra_body": {
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "user_0_account__session_0"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    }

    async def scenario(it: World) -> None:
        date = {"role": "system", "content": "The date is 2026-01-01."}
        first = await ask(it, messages=[{"role": "user", "content": blocks("Do it.")}, date], **more)
        chat = [{"role": "user", "content": "Do it."}, date, echo(first)]
        newest = results(first, blocks("a.txt"))
        second = await ask(it, messages=[*chat, newest], **more)
        chat += [results(first, "a.txt"), echo(second), {"role": "user", "content": blocks("And?")}]
        more["tools"] = [{**TOOLS[0], **mark}]
        await ask(it, messages=chat, **more)

    session = run(scenario, [THOUGHT, letters("One file."), letters("Done.")])
    assert [r.parent for r in session.records] == [None, 0, 1] and session.ledger.notes == {}
    assert [m.role for m in session.records[0].messages] == ["system", "user", "system"]
    assert session.records[0].messages[0].content == "You are Claude Code.\ncwd: /work"


def test_a_count_is_the_prompt_that_is_then_served() -> None:
    async def scenario(it: World) -> None:
        counting = {k: v for k, v in ASK.items() if k != "max_tokens"}
        messages = list(START)
        async with client(it) as sdk:
            for turn in range(3):
                count = await sdk.messages.count_tokens(**counting, messages=messages)
                assert len(it.session.records) == turn
                message = await streamed(it, messages=messages)
                usage = message.usage
                assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
                messages += [echo(message), {"role": "user", "content": "Go on."}]
            with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0"):
                await sdk.messages.count_tokens(model="m", messages=[IMAGE])

    session = run(scenario, [letters("a"), letters("b"), letters("c")])
    assert session.served == 3 and session.ledger.notes == {}, "counts leave no trace"


def test_discovery_leaves_no_trace() -> None:
    async def scenario(it: World) -> None:
        base = f"{it.server.base_url}/rollout/r1"
        for path in ("", "/", "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/api/hello"):
            response = await it.http.head(base + path)
            assert (response.status_code, response.content) == (200, b"")
        async with client(it) as sdk:
            models = [m async for m in sdk.models.list()]
            assert models and models[0].type == "model" and models[0].display_name
            assert models[0].max_input_tokens == it.engine.max_context
            one = await sdk.models.retrieve(models[0].id)
            assert (one.id, one.created_at.year) == (models[0].id, 1970)

    session = run(scenario, [])
    assert session.records == [] and session.served == 0 and session.ledger.notes == {}


@BOTH
def test_refusals_are_the_sdks_own_errors(ask: Ask) -> None:
    cases: list[tuple[Json, str]] = [
        ({"messages": [*START, {"role": "assistant", "content": "The"}]}, "does not support assistant message prefill"),
        ({"messages": [IMAGE]}, r"^messages\.0\.content\.0: .*'image'"),
        ({"messages": START, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": START, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"^tools\.0\.type: "),
        ({"messages": START, "extra_body": {"mcp_servers": [{"url": "u"}]}}, "mcp_servers"),
    ]

    async def scenario(it: World) -> None:
        for fields, words in cases:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await ask(it, **fields)
            error = caught.value
            assert error.type == "invalid_request_error" and error.api_message is not None
            assert re.search(words, error.api_message)

    session = run(scenario, [])
    assert session.records == [] and sum(session.ledger.notes.values()) == len(cases)


@BOTH
def test_a_prompt_past_the_context_is_what_claude_code_compacts_on(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(it, messages=START)
        async with client(it) as sdk:
            counting = {k: v for k, v in ASK.items() if k != "max_tokens"}
            count = await sdk.messages.count_tokens(**counting, messages=START)
        assert caught.value.api_message == f"prompt is too long: {count.input_tokens} tokens > 39 maximum"

    session = run(scenario, [letters("a")], max_context=40)
    assert session.records == [] and not session.failed.is_set()


@BOTH
def test_a_met_budget_says_so(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        await ask(it, messages=START)
        with pytest.raises(anthropic.BadRequestError, match="budget of 1 calls") as caught:
            await ask(it, messages=START)
        assert caught.value.error_code == "rollout_budget_exhausted"

    assert len(run(scenario, [letters("a")] * 2, budget=Budget(max_calls=1)).records) == 1


def test_an_unknown_rollout_is_not_found() -> None:
    async def scenario(it: World) -> None:
        async with client(it, "r2") as sdk:
            with pytest.raises(anthropic.NotFoundError, match="no rollout 'r2'") as caught:
                await sdk.messages.create(**ASK, messages=START)
        assert caught.value.type == "not_found_error"

    run(scenario, [])


@BOTH
def test_a_failing_engine_is_an_api_error(ask: Ask) -> None:
    class Failing(ScriptedEngine):
        async def generate(self, request: EngineRequest) -> Any:
            await asyncio.sleep(0.05)
            raise EngineError("out of memory")

    async def scenario(it: World) -> None:
        with pytest.raises(anthropic.APIStatusError, match="out of memory") as caught:
            await ask(it, messages=START)
        assert (caught.value.type, caught.value.error_code) == ("api_error", "engine_error")

    session = run(scenario, Failing(lambda *_: letters("a")))
    assert session.records == [] and session.failed.is_set()


@BOTH
def test_a_truncated_answer_says_max_tokens(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        message = await ask(it, messages=START, max_tokens=3)
        assert (message.stop_reason, message.content[0].text) == ("max_tokens", "abc")  # type: ignore[union-attr]
        assert message.usage.output_tokens == 3

    assert run(scenario, [letters("abcdef")]).records[0].call.finish_reason == "length"


@BOTH
def test_a_stop_sequence_ends_the_answer_and_is_named(ask: Ask) -> None:
    async def scenario(it: World) -> None:
        message = await ask(it, messages=START, stop_sequences=["never", "END"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
        assert message.content[0].text == "abc"  # type: ignore[union-attr]
        plain = await ask(it, messages=START)
        assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)

    run(scenario, [letters("abcENDdef"), letters("abcENDdef")])


def test_pings_keep_a_waiting_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)

    async def scenario(it: World) -> None:
        asking = asyncio.create_task(streamed(it, messages=START))
        pending = await it.stepwise.next_call()
        await asyncio.sleep(0.1)
        it.stepwise.answer(pending, letters("At last."))
        assert (await asking).content[0].text == "At last."  # type: ignore[union-attr]

        url = f"{it.server.base_url}/rollout/r1/v1/messages?beta=true"
        body = {**ASK, "messages": START, "stream": True}
        request: asyncio.Task[httpx.Response] = asyncio.create_task(it.http.post(url, json=body))
        pending = await it.stepwise.next_call()
        await asyncio.sleep(0.1)
        it.stepwise.answer(pending, letters("Again."))
        response = await request
        assert response.headers["content-type"].startswith("text/event-stream")
        names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
        pings = names.index("message_start")
        assert pings >= 2 and set(names[:pings]) == {"ping"} and "ping" not in names[pings:]

    session: Session = run(scenario, StepwiseEngine(max_context=4096))
    assert len(session.records) == 2
