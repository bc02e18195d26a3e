"""The engines without a model: scripted, stepwise, and any endpoint over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from clawgym_env.engines.base import Engine, EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import StepwiseEngine
from clawgym_env.engines.upstream import UpstreamEngine
from clawgym_env.errors import EngineError
from clawgym_env.proxy.app import Proxy
from clawgym_env.proxy.server import ProxyServer
from clawgym_env.proxy.session import Session
from clawgym_env.rendering import ChatRenderer
from clawgym_env.types import ChatRequest, Generation, Message, Sampling, TokenArray, ToolCall, ToolSpec

RENDERER = ChatRenderer.from_folder()
STOP = RENDERER.stop_token_ids[0]
BASH = ToolSpec("bash", "run", {"type": "object"})
CHAT = ChatRequest("policy", (Message("system", "Be brief."), Message("user", "Hi.")), (BASH,))


def request(rollout: str = "r", max_tokens: int = 100, chat: ChatRequest = CHAT) -> EngineRequest:
    prompt = RENDERER.prompt(chat.messages, chat.tools)
    return EngineRequest(prompt, Sampling(0.5, 0.9, max_tokens=max_tokens), RENDERER.stop_token_ids, chat, rollout)


def ids(*values: int) -> TokenArray:
    return np.array(values, dtype=np.int64)


def facts(generation: Generation) -> tuple[list[int], str]:
    return generation.token_ids.tolist(), generation.finish_reason


# --- scripted ---


def test_a_script_knows_the_turn_of_each_rollout() -> None:
    engine = ScriptedEngine(lambda _, turn: ids(10 + turn, STOP))

    async def run() -> list[list[int]]:
        return [(await engine.generate(request(r))).token_ids.tolist() for r in ("a", "b", "a", "a", "b")]

    assert asyncio.run(run()) == [[10, STOP], [10, STOP], [11, STOP], [12, STOP], [11, STOP]]
    assert isinstance(engine, Engine)


@pytest.mark.parametrize(
    ("script", "max_tokens", "expected"),
    [
        ((5, 6, STOP), 3, ([5, 6, STOP], "stop")),
        ((5, 6, STOP), 2, ([5, 6], "length")),
        ((5, 6), 2, ([5, 6], "length")),
        ((5, STOP, 7), 2, ([5, STOP], "length")),
    ],
)
def test_a_script_is_cut_like_any_policy(script: tuple[int, ...], max_tokens: int, expected: Any) -> None:
    generation = asyncio.run(ScriptedEngine(lambda *_: ids(*script)).generate(request(max_tokens=max_tokens)))
    assert facts(generation) == expected
    assert generation.log_probs.tolist() == [0.0] * len(generation.token_ids)
    assert generation.versions.tolist() == [0] * len(generation.token_ids)


def test_a_script_that_fails_or_is_silent_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match=r"failed at turn 0: ZeroDivisionError"):
        asyncio.run(ScriptedEngine(lambda _, turn: ids(1 // turn)).generate(request()))
    with pytest.raises(EngineError, match="nothing to say at turn 0"):
        asyncio.run(ScriptedEngine(lambda *_: ids()).generate(request()))


# --- stepwise ---


def stepwise(scenario: Callable[[StepwiseEngine], Coroutine[Any, Any, None]]) -> None:
    engine = StepwiseEngine(max_context=64)
    assert isinstance(engine, Engine)
    asyncio.run(asyncio.wait_for(scenario(engine), 10))


def test_calls_are_answered_first_in_first_out() -> None:
    async def scenario(engine: StepwiseEngine) -> None:
        calls = [asyncio.create_task(engine.generate(request(r))) for r in "abc"]
        await asyncio.sleep(0)
        for k, rollout in enumerate("abc"):
            assert engine.waiting == 3 - k
            call = await engine.next_call()
            assert call.request.rollout_id == rollout
            engine.answer(call, ids(k, STOP))
        for k, generation in enumerate(await asyncio.gather(*calls)):
            assert facts(generation) == ([k, STOP], "stop")
            assert np.isnan(generation.log_probs).all()

    stepwise(scenario)


def test_next_call_waits_for_one_to_come() -> None:
    async def scenario(engine: StepwiseEngine) -> None:
        waiter = asyncio.create_task(engine.next_call())
        await asyncio.sleep(0)
        assert not waiter.done()
        task = asyncio.create_task(engine.generate(request()))
        engine.answer(await waiter, ids(STOP))
        assert facts(await task) == ([STOP], "stop")

    stepwise(scenario)


def test_a_call_whose_client_went_away_is_passed_over() -> None:
    async def scenario(engine: StepwiseEngine) -> None:
        gone, stays = (asyncio.create_task(engine.generate(request(r))) for r in ("gone", "stays"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        call = await engine.next_call()
        assert call.request.rollout_id == "stays"
        stays.cancel()
        await asyncio.gather(stays, return_exceptions=True)
        engine.answer(call, ids(STOP))  # too late, and no error

    stepwise(scenario)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((5, 6, STOP), ([5, 6, STOP], "stop")),
        ((5, 6, 7), ([5, 6, 7], "length")),
        ((5, 6, 7, STOP), ([5, 6, 7], "length")),
        ((5,), ([5], "stop")),
    ],
)
def test_an_answer_is_cut_at_the_limit(answer: tuple[int, ...], expected: Any) -> None:
    async def scenario(engine: StepwiseEngine) -> None:
        task = asyncio.create_task(engine.generate(request(max_tokens=3)))
        engine.answer(await engine.next_call(), ids(*answer))
        assert facts(await task) == expected

    stepwise(scenario)


def test_closing_fails_every_waiting_call_also_the_one_in_hand() -> None:
    async def scenario(engine: StepwiseEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request(r))) for r in "ab"]
        in_hand = await engine.next_call()
        await engine.aclose()
        await engine.aclose()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "closed" in str(outcome)
        engine.answer(in_hand, ids(STOP))
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request())

    stepwise(scenario)


# --- upstream ---


@asynccontextmanager
async def endpoint(answer: Callable[[Request], Coroutine[Any, Any, Response]]) -> AsyncIterator[str]:
    """A real HTTP server with one route."""
    config = uvicorn.Config(
        Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]), log_config=None
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task
        listener.close()


def ask_upstream(answer: Callable[[Request], Coroutine[Any, Any, Response]], **settings: Any) -> Generation:
    async def run() -> Generation:
        async with endpoint(answer) as url:
            engine = UpstreamEngine(url, model="big", renderer=RENDERER, **settings)
            try:
                return await engine.generate(request())
            finally:
                await engine.aclose()

    return asyncio.run(asyncio.wait_for(run(), 20))


def completion(message: dict[str, Any], finish: str = "stop") -> JSONResponse:
    return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def test_an_endpoints_text_is_recorded_as_untrainable_tokens() -> None:
    seen: dict[str, Any] = {}

    async def answer(http: Request) -> Response:
        seen.update(body=await http.json(), key=http.headers["authorization"])
        return completion({"role": "assistant", "content": "Hello."})

    generation = ask_upstream(answer, api_key="secret")
    assert generation.token_ids.tolist() == RENDERER.encode_reply("Hello.").tolist()
    assert np.isnan(generation.log_probs).all() and set(generation.versions.tolist()) == {-1}
    assert generation.finish_reason == "stop"
    assert seen["key"] == "Bearer secret"
    assert seen["body"] == {
        "model": "big",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
        "tools": [
            {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}
        ],
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 100,
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "parsed"), [('{"command": "ls"}', {"command": "ls"}), ("", {}), ("[1]", "[1]")])
def test_an_endpoints_tool_calls_are_encoded(arguments: str, parsed: Any) -> None:
    async def answer(_: Request) -> Response:
        call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        return completion({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls")

    generation = ask_upstream(answer)
    assert generation.token_ids.tolist() == RENDERER.encode_reply("", ToolCall("bash", parsed)).tolist()
    assert generation.finish_reason == "stop"


def test_an_endpoints_cut_is_a_cut() -> None:
    async def answer(_: Request) -> Response:
        return completion({"role": "assistant", "content": "I was"}, "length")

    assert ask_upstream(answer).finish_reason == "length"


BAD = {
    "an error status": (JSONResponse({"error": "overloaded"}, 503), r"answered 503: .*overloaded"),
    "not JSON": (PlainTextResponse("<html>"), "did not answer with a chat completion"),
    "no choices": (JSONResponse({"choices": []}), "did not answer with a chat completion"),
    "a list": (JSONResponse([1]), "did not answer with a chat completion"),
    "no message": (JSONResponse({"choices": [{}]}), "did not answer with a chat completion"),
    "content parts": (completion({"content": [{"type": "text"}]}), "content is list"),
    "a nameless call": (completion({"tool_calls": [{"function": {}}]}), "did not answer with a chat completion"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_an_endpoint_that_answers_something_else_is_an_engine_error(case: str) -> None:
    response, message = BAD[case]

    async def answer(_: Request) -> Response:
        return response

    with pytest.raises(EngineError, match=message) as caught:
        ask_upstream(answer)
    assert "/v1/chat/completions" in str(caught.value)


def test_an_endpoint_that_hangs_is_an_engine_error() -> None:
    async def answer(_: Request) -> Response:
        await asyncio.sleep(1)
        return completion({"content": "late"})

    with pytest.raises(EngineError, match=r"cannot be asked: ReadTimeout"):
        ask_upstream(answer, timeout_s=0.1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "no-scheme/v1"])
def test_an_endpoint_that_cannot_be_reached_is_an_engine_error(url: str) -> None:
    async def run() -> None:
        engine = UpstreamEngine(url, model="big", renderer=RENDERER)
        try:
            await engine.generate(request())
        finally:
            await engine.aclose()

    with pytest.raises(EngineError, match="cannot be asked"):
        asyncio.run(run())


def test_our_own_proxy_can_be_the_endpoint() -> None:
    """The request that the engine sends is one that the proxy accepts, and what comes back is what the script said."""
    answers = [RENDERER.encode_reply("Look.", ToolCall("bash", {"command": "ls"})), RENDERER.encode_reply("Done.")]

    async def run() -> list[list[int]]:
        proxy = Proxy()
        behind = Session("behind", ScriptedEngine(lambda _, turn: answers[turn]), RENDERER)
        proxy.register(behind)
        async with ProxyServer(proxy) as server:
            engine = UpstreamEngine(f"{server.base_url}/rollout/behind/v1", model="policy", renderer=RENDERER)
            front = Session("front", engine, RENDERER)
            first = await front.draft(await front.admit(CHAT, {}))
            front.commit(first)
            result = Message("tool", "a.txt", tool_call_id=first.reply.tool_calls[0].id)
            again = replace(CHAT, messages=(*CHAT.messages, first.reply, result))
            second = await front.draft(await front.admit(again, {}))
            await engine.aclose()
        assert behind.tree.parent_call(1) == 0
        return [first.generation.token_ids.tolist(), second.generation.token_ids.tolist()]

    assert asyncio.run(run()) == [a.tolist() for a in answers]
