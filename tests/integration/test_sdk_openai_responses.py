"""The official OpenAI client's Responses API against the model boundary, over a real socket, as its users loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import StepwiseEngine
from clawgym_env.errors import EngineError
from clawgym_env.proxy import exchange
from clawgym_env.proxy.session import Session
from clawgym_env.tree.pack import pack
from clawgym_env.types import Budget, Message, ToolCall
from tests.proxy_world import RENDERER, World, letters, raw, run

Json = dict[str, Any]
Ask = Callable[..., Awaitable[Response]]
BASH: Json = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}, "strict": False}
GRAMMAR: Json = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "edit", "format": GRAMMAR}
START: list[Any] = [{"role": "user", "content": "List the files."}]
ENCRYPTED = "reasoning.encrypted_content"
ASK: Json = {"model": "gpt-any", "instructions": "You are an agent.", "tools": [BASH, PATCH], "store": False}
THOUGHT = RENDERER.encode_reply("Looking.", ToolCall("bash", {"command": "ls -la"}), reasoning="Files first.")
PATCHING = RENDERER.encode_reply("", ToolCall("apply_patch", {"input": "*** Begin\n+ż"}), reasoning="Now edit.")


async def whole(it: World, **fields: Any) -> Response:
    response: Response = await it.client.responses.create(**{**ASK, **fields})
    return response


async def raw_events(it: World, **fields: Any) -> list[ResponseStreamEvent]:
    """The events as the SDK types them, in the order in which the API numbers them."""
    seen = [e async for e in await it.client.responses.create(**{**ASK, **fields}, stream=True)]
    assert [e.sequence_number for e in seen] == list(range(len(seen)))
    assert [e.type for e in seen[:2]] == ["response.created", "response.in_progress"]
    return seen


async def events(it: World, **fields: Any) -> Response:
    """By hand from the raw events: items when they are done, as Codex does it."""
    *seen, end = await raw_events(it, **fields)
    assert end.type == "response.completed"
    done = [e.item for e in seen if e.type == "response.output_item.done"]
    assert [i.to_dict() for i in done] == [i.to_dict() for i in end.response.output]
    return end.response


async def streamed(it: World, **fields: Any) -> Response:
    text = ""
    async with it.client.responses.stream(**{**ASK, **fields}) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
        final = await stream.get_final_response()
    assert final.output_text == text
    return final


def threaded(stream: bool) -> Ask:
    def ask(base: str, fields: Json) -> Response:
        http = openai.DefaultHttpxClient(verify=False)
        with openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=20, http_client=http) as sdk:
            if not stream:
                return sdk.responses.create(**fields)
            with sdk.responses.stream(**fields) as opened:
                return opened.get_final_response()

    async def asked(it: World, **fields: Any) -> Response:
        base = f"{it.server.base_url}/rollout/{it.session.rollout_id}/v1"
        return await asyncio.to_thread(ask, base, {**ASK, **fields})

    return asked


WAYS: dict[str, Ask] = {
    "whole": whole,
    "raw events": events,
    "streamed": streamed,
    "whole, sync": threaded(False),
    "streamed, sync": threaded(True),
}
BOTH = pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])


def results(response: Response, *outputs: Any) -> list[Json]:
    """The items that answer a response's calls."""
    calls = [i for i in response.output if i.type in ("function_call", "custom_tool_call")]
    pairs = zip(calls, outputs, strict=True)
    return [{"type": f"{c.type}_output", "call_id": c.call_id, "output": o} for c, o in pairs]


def plain(response: Response) -> list[Json]:
    """Items without the fields that the SDK's stream helper adds."""
    dumped = [i.model_dump(exclude_none=True) for i in response.output]
    for item in dumped:
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    return dumped


@pytest.mark.parametrize("include", [[], [ENCRYPTED]], ids=["summary", "encrypted"])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_conversation_with_tools_and_thinking_is_one_chain(way: str, include: list[str]) -> None:
    both = raw(
        'Two.\n<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "b"}}\n</tool_call><|im_end|>'
    )

    async def scenario(it: World) -> None:
        items: list[Any] = list(START)
        for outputs in (["a.txt"], [[{"type": "input_text", "text": "Done."}]], ["1", "2"]):
            response = await WAYS[way](it, input=items, include=include)
            assert response.status == "completed" and response.error is None
            items += response.output
            items += results(response, *outputs)
        last = await WAYS[way](it, input=items, include=include)
        assert last.output_text == "All done."
        assert last.usage is not None and last.usage.input_tokens == len(it.prompts[-1].prompt_ids)
        assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens

    session = run(scenario, [THOUGHT, PATCHING, both, letters("All done.")])
    assert [r.parent for r in session.records] == [None, 0, 1, 2]
    replies = [r.reply for r in session.records]
    assert replies[0] == Message(
        "assistant", "Looking.", "Files first.", (ToolCall("bash", {"command": "ls -la"}, "call1x0"),)
    )
    assert replies[1].tool_calls == (ToolCall("apply_patch", {"input": "*** Begin\n+ż"}, "call2x0"),)
    assert [c.arguments for c in replies[2].tool_calls] == [{"command": "a"}, {"command": "b"}]
    assert [m.content for m in session.records[3].messages] == ["1", "2"]
    assert pack(session.tree).trainable.sum() == session.ledger.captured


@pytest.mark.parametrize("include", [[], [ENCRYPTED]], ids=["summary", "encrypted"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("dump", [False, True])
def test_an_echo_is_the_message_that_was_said(way: str, include: list[str], dump: bool) -> None:
    """The answers as messages, read from the next request, equal what was sampled: content, reasoning, calls, ids."""
    seen: list[EngineRequest] = []

    async def scenario(it: World) -> None:
        items: list[Any] = list(START)
        for output in ("a.txt", "Done."):
            response = await WAYS[way](it, input=items, include=include)
            items += plain(response) if dump else response.output
            items += results(response, output)
        await WAYS[way](it, input=items, include=include)
        seen.extend(it.prompts)

    session = run(scenario, [THOUGHT, PATCHING, letters("All done.")])
    said = [r.reply for r in session.records]
    assert seen[2].chat.messages == (
        Message("system", "You are an agent."),
        Message("user", "List the files."),
        said[0],
        Message("tool", "a.txt", tool_call_id="call1x0"),
        said[1],
        Message("tool", "Done.", tool_call_id="call2x0"),
    )
    assert [m.reasoning for m in said] == ["Files first.", "Now edit.", None]
    assert [t.free_text for t in seen[2].chat.tools] == [False, True]


def test_every_way_gives_the_same_answer() -> None:
    async def scenario(it: World) -> None:
        bodies = []
        for ask in WAYS.values():
            response = await ask(it, input="Go.", include=[ENCRYPTED])
            assert response.usage is not None
            usage = response.usage.model_dump(exclude={"input_tokens_details"})
            bodies.append([plain(response), response.status, response.output_text, usage])
        for number, body in enumerate(bodies, 1):
            text = str(body).replace(f"rs_{number}'", "rs_1'").replace(f"msg_{number}'", "msg_1'")
            assert text.replace(f"fc_{number}x", "fc_1x").replace(f"call{number}x", "call1x") == str(bodies[0])

    run(scenario, [THOUGHT] * len(WAYS))


def test_a_stateless_client_that_keeps_only_encrypted_reasoning_gives_it_back() -> None:
    async def scenario(it: World) -> None:
        first = await whole(it, input=START, include=[ENCRYPTED])
        reasoning, *rest = plain(first)
        kept = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
        await whole(it, input=[*START, kept, *rest, *results(first, "a.txt")], include=[ENCRYPTED])
        assert it.prompts[1].chat.messages[2] == it.session.records[0].reply

    session = run(scenario, [THOUGHT, letters("Done.")])
    assert session.records[1].parent == 0


@pytest.mark.parametrize("limit", [3, 30])
def test_a_truncated_answer_is_incomplete_and_runs_nothing(limit: int) -> None:
    answer = RENDERER.encode_reply(
        "I look at the files", *(ToolCall("bash", {"command": c}) for c in ("ls", "a much longer command than that"))
    )
    assert len(answer) > 30

    async def scenario(it: World) -> None:
        body = await whole(it, input=START, max_output_tokens=limit)
        *seen, end = await raw_events(it, input=START, max_output_tokens=limit)
        assert end.type == "response.incomplete"
        for response in (body, end.response):
            assert response.status == "incomplete" and response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.usage is not None and response.usage.output_tokens == limit
            assert {getattr(i, "status", None) for i in response.output} == {"incomplete"}
        assert [i.type for i in body.output] == [i.type for i in end.response.output]
        assert body.output_text == end.response.output_text
        done = [e.item.type for e in seen if e.type == "response.output_item.done"]
        assert done == ["message"]
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            async with it.client.responses.stream(**ASK, input=START, max_output_tokens=limit) as stream:
                await stream.get_final_response()

    run(scenario, [answer] * 3)


def test_an_overflow_is_a_400_unless_the_client_streams() -> None:
    """Codex tells it from other refusals only where the stream says so."""

    async def scenario(it: World) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await whole(it, input="word " * 200)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        created, failed = [e async for e in await it.client.responses.create(**ASK, input="word " * 200, stream=True)]
        assert created.type == "response.created" and failed.type == "response.failed"
        error = failed.response.error
        assert error is not None and str(error.code) == "context_length_exceeded"
        assert error.message.startswith("Your input exceeds the context window of this model.")
        assert failed.response.status == "failed"
        async with it.client.responses.stream(**ASK, input="word " * 200) as stream:
            assert [e.type async for e in stream] == ["response.created", "response.failed"]

    session = run(scenario, [], max_context=64)
    assert session.records == [] and session.served == 0 and not session.failed.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(stream: bool) -> None:
    async def scenario(it: World) -> None:
        for field, value in {
            "previous_response_id": "resp_1",
            "background": True,
            "truncation": "auto",
            "include": ["message.output_text.logprobs"],
        }.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await it.client.responses.create(**{**ASK, field: value}, input="Go.", stream=stream)
            assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
        with pytest.raises(openai.BadRequestError) as caught:
            await it.client.responses.create(**{**ASK, "tools": [{"type": "web_search"}]}, input="Go.", stream=stream)
        assert caught.value.param == "tools[0].type"
        with pytest.raises(openai.BadRequestError, match="prefill"):
            await it.client.responses.create(**ASK, input=[*START, {"role": "assistant", "content": "So"}])

    session = run(scenario, [])
    assert session.records == [] and not session.failed.is_set()


def test_a_spent_budget_is_a_refusal_that_no_client_repeats() -> None:
    async def scenario(it: World) -> None:
        await whole(it, input="Go.")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await it.client.responses.create(**ASK, input="Go.", stream=stream)
            assert caught.value.code == "rollout_budget_exhausted"

    assert run(scenario, [letters("a")], budget=Budget(max_calls=1)).exhausted.is_set()


def failing(request: EngineRequest, turn: int) -> Any:
    raise EngineError("out of memory")


def test_a_failing_engine_fails_the_response() -> None:
    async def scenario(it: World) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await whole(it, input="Go.")
        assert caught.value.code == "engine_error"
        seen = [e async for e in await it.client.responses.create(**ASK, input="Go.", stream=True)]
        assert [e.type for e in seen] == ["response.created", "response.failed"]
        assert seen[1].type == "response.failed" and seen[1].response.error is not None
        assert (seen[1].response.error.code, "out of memory" in seen[1].response.error.message) == (
            "server_error",
            True,
        )

    session = run(scenario, ScriptedEngine(failing, max_context=4096))
    assert session.records == [] and session.failed.is_set()


def test_a_slow_answer_is_held_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)

    async def scenario(it: World) -> None:
        task = asyncio.create_task(streamed(it, input="Go."))
        pending = await it.stepwise.next_call()
        await asyncio.sleep(0.1)
        it.stepwise.answer(pending, letters("Slow."))
        assert (await task).output_text == "Slow."

    run(scenario, StepwiseEngine(max_context=4096))


@BOTH
def test_a_call_is_committed_before_its_end_is_sent(ask: Ask) -> None:
    committed: list[int] = []

    def watched(app: Any, session: Session) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            async def sending(event: Any) -> None:
                if b'"status":"completed","error":null' in event.get("body", b""):
                    committed.append(len(session.records))
                await send(event)

            await app(scope, receive, sending)

        return wrapped

    async def scenario(it: World) -> None:
        await ask(it, input="Go.")

    run(scenario, [letters("a")], wrap=watched)
    assert committed == [1]
