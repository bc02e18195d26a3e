"""Retries, resamples and retold histories over real sockets: what becomes of them in the tree, in budgets and notes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from clawgym_env.dialect import SAFE, Dialect, Rewrite, Tolerance
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import PendingCall, StepwiseEngine
from clawgym_env.proxy.calls import FrozenModel
from clawgym_env.types import Budget, Message
from tests.proxy_world import RENDERER, START, TOOLS, World, call, letters, raw, run

STREAMING = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
BODY: dict[str, Any] = {"model": "policy", "messages": START, "tools": TOOLS}
RETRY = {"x-stainless-retry-count": "1"}
SHARED = "retry answered by the first attempt's answer"


def slow() -> StepwiseEngine:
    """An engine that answers when the test says so."""
    return StepwiseEngine(max_context=4096)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the server's state has no event of its own
        await asyncio.sleep(0.002)


def posting(it: World, *, stream: bool = False, **more: Any) -> asyncio.Task[httpx.Response]:
    """A request on a connection of its own."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return asyncio.create_task(it.http.post(it.url, json={**BODY, "stream": stream, **options, **more}))


async def leave(task: asyncio.Task[httpx.Response]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def asked_twice(
    it: World, *, stream: bool
) -> AsyncIterator[tuple[list[asyncio.Task[httpx.Response]], PendingCall]]:
    """The same request on two connections, the second once the first one's generation has begun."""
    tasks = [posting(it, stream=stream)]
    pending = await it.stepwise.next_call()
    tasks.append(posting(it, stream=not stream))
    attempt = next(iter(it.session._attempts._open))
    await until(lambda: attempt.waiting == 2)
    try:
        yield tasks, pending
    finally:
        for task in tasks:
            await leave(task)


# --- the same request while the first is on its way ---


@STREAMING
def test_identical_requests_at_once_are_one_call(stream: bool) -> None:
    async def scenario(it: World) -> None:
        async with asked_twice(it, stream=stream) as (tasks, pending):
            assert it.stepwise.waiting == 0 and it.session.in_flight == 1
            it.stepwise.answer(pending, letters("ab"))
            whole, streamed = await tasks[stream], await tasks[not stream]
        said = whole.json()
        assert said["choices"][0]["message"]["content"] == "ab"
        assert '"content":"ab"' in streamed.text and f'"id":"{said["id"]}"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n") and '"completion_tokens":3' in streamed.text

    session = run(scenario, slow(), budget=Budget(max_calls=1))
    assert len(session.records) == 1 and session.served == 1 and session.in_flight == 0
    assert session.ledger.notes == {SHARED: 1} and session.ledger.captured == 3
    assert not session.exhausted.is_set()


@STREAMING
@pytest.mark.parametrize("leaver", [0, 1])
def test_one_client_that_leaves_does_not_end_the_others_answer(stream: bool, leaver: int) -> None:
    async def scenario(it: World) -> None:
        async with asked_twice(it, stream=stream) as (tasks, pending):
            await leave(tasks[leaver])
            await until(lambda: it.session.ledger.notes["client went away while a call was pending"] == 1)
            assert not pending.answer.done() and it.session.in_flight == 1
            it.stepwise.answer(pending, letters("ab"))
            assert (await tasks[1 - leaver]).status_code == 200

    session = run(scenario, slow())
    assert len(session.records) == 1 and session.ledger.aborted == 0 and session.in_flight == 0


@STREAMING
def test_the_last_client_that_leaves_ends_the_generation(stream: bool) -> None:
    async def scenario(it: World) -> None:
        async with asked_twice(it, stream=stream) as (tasks, pending):
            await leave(tasks[0])
            await leave(tasks[1])
            await until(pending.answer.cancelled)
            await until(lambda: it.session.in_flight == 0)
        again = posting(it, stream=stream)
        it.stepwise.answer(await it.stepwise.next_call(), letters("ab"))
        assert (await again).status_code == 200

    session = run(scenario, slow())
    assert len(session.records) == 1 and session.ledger.notes[SHARED] == 0 and not session.failed.is_set()


def test_what_differs_is_another_call() -> None:
    async def scenario(it: World) -> None:
        tasks = [posting(it), posting(it, temperature=0.5), posting(it, messages=START[:1])]
        for _ in tasks:
            it.stepwise.answer(await it.stepwise.next_call(), letters("ab"))
        assert [(await t).status_code for t in tasks] == [200] * 3

    assert len(run(scenario, slow()).records) == 3


def test_requests_admitted_together_do_not_exceed_the_budget() -> None:
    async def scenario(it: World) -> None:
        tasks = [posting(it, temperature=t / 10) for t in range(6)]
        for _ in range(2):
            it.stepwise.answer(await it.stepwise.next_call(), letters("ab"))
        codes = sorted([(await t).status_code for t in tasks])
        assert codes == [200] * 2 + [400] * 4

    assert len(run(scenario, slow(), budget=Budget(max_calls=2)).records) == 2


def test_a_failure_of_the_engine_reaches_both() -> None:
    async def scenario(it: World) -> None:
        async with asked_twice(it, stream=False) as (tasks, _):
            await it.stepwise.aclose()
            answers = [await t for t in tasks]
        assert all("the policy engine failed: the environment was closed" in a.text for a in answers)

    session = run(scenario, slow())
    assert session.failed.is_set() and session.in_flight == 0 and session.records == []


# --- the same request later ---


@asynccontextmanager
async def cutting(url: str) -> AsyncIterator[str]:
    """A relay that swallows the first connection's answer and then cuts it: the call is committed, the client is not
    told. Later connections pass."""
    target = urlsplit(url)
    swallowed = False
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal swallowed
        first, swallowed = not swallowed, True
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        there, back = await asyncio.open_connection(target.hostname, target.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

        upward = asyncio.create_task(pump(reader, back))
        try:
            if first:
                await there.readuntil(b"\r\n\r\n")
                await there.read(65536)
            else:
                await pump(there, writer)
        finally:
            upward.cancel()
            await asyncio.gather(upward, return_exceptions=True)
            for stream in (back, writer):
                stream.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{target.path}"
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def test_a_retry_of_the_official_client_is_answered_by_the_call_that_was_committed() -> None:
    """The answer got lost on the way; the client asks again and says so."""

    async def scenario(it: World) -> None:
        base = it.url.removesuffix("/chat/completions")
        async with cutting(base) as url:
            plain = openai.DefaultAsyncHttpxClient(verify=False)
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=2, http_client=plain) as client:
                create: Any = client.chat.completions.create
                answer = await create(model="policy", messages=START, tools=TOOLS)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        assert message["content"] == "first"
        await it.ask([*START, message, {"role": "user", "content": "So?"}])

    session = run(scenario, [letters("first"), letters("second")])
    assert [r.parent for r in session.records] == [None, 0]
    assert session.ledger.notes == {SHARED: 1} and session.records[1].hints.retry is False


@STREAMING
def test_an_unmarked_repetition_is_a_sibling(stream: bool) -> None:
    async def scenario(it: World) -> None:
        first, _ = await it.ask(START, stream=stream)
        second, _ = await it.ask(START, stream=stream)
        assert (first["content"], second["content"]) == ("one", "two")
        for answer in (first, second):
            await it.ask([*START, answer, {"role": "user", "content": "So?"}])

    session = run(scenario, [letters(w) for w in ("one", "two", "three", "four")])
    assert [r.parent for r in session.records] == [None, None, 0, 1]
    assert session.tree.leaf_calls() == [2, 3] and SHARED not in session.ledger.notes
    assert session.continued == {0, 1}


def test_a_retry_of_an_answer_that_was_continued_is_a_new_sample() -> None:
    async def scenario(it: World) -> None:
        first, _ = await it.ask(START)
        again, _ = await it.ask(START, extra_headers=RETRY)
        assert again == first
        await it.ask([*START, first, {"role": "user", "content": "So?"}])
        other, _ = await it.ask(START, extra_headers=RETRY)
        assert other["content"] == "three"

    session = run(scenario, [letters(w) for w in ("one", "two", "three")])
    assert [r.parent for r in session.records] == [None, 0, None]
    assert session.ledger.notes[SHARED] == 1
    assert session.continued == {0} and session.tree.leaf_calls() == [1, 2]


def test_a_retry_costs_no_budget_and_a_frozen_models_answer_is_given_again_too() -> None:
    frozen = {"judge": FrozenModel(ScriptedEngine(lambda request, turn: letters(f"aside {turn}")), RENDERER)}

    async def scenario(it: World) -> None:
        create: Any = it.client.chat.completions.create
        for model, word in (("policy", "one"), ("judge", "aside 0")):
            for headers in ({}, RETRY, RETRY):
                answer = await create(model=model, messages=START, extra_headers=headers)
                assert answer.choices[0].message.content == word

    session = run(scenario, [letters("one")], budget=Budget(max_calls=2), frozen=frozen)
    assert len(session.records) == len(session.frozen_calls) == 1
    assert session.ledger.notes == {SHARED: 4} and not session.exhausted.is_set()


def test_a_dialect_without_the_header_knows_no_marked_retry() -> None:
    async def scenario(it: World) -> None:
        await it.ask(START)
        await it.ask(START, extra_headers=RETRY)

    session = run(scenario, [letters("one"), letters("two")], dialect=Dialect(retry_header=None))
    assert len(session.records) == 2


# --- retold histories ---


BOTH = raw(
    'Two.\n<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "b"}}\n</tool_call><|im_end|>'
)


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": f"result of {c['function']['arguments']}"}
        for c in message["tool_calls"]
    ]


def in_order(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [message, *results(message)]


def swapped(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [message, *reversed(results(message))]


ANEW = "history rendered anew: an answer that was not sampled follows the history"


def split(message: dict[str, Any]) -> list[dict[str, Any]]:
    first, second = ({**message, "tool_calls": [c]} for c in message["tool_calls"])
    a, b = results(message)
    return [first, a, {**second, "content": None}, b]


@pytest.mark.parametrize(
    ("told", "difference"),
    [(in_order, None), (swapped, Tolerance.REORDERED_RESULTS), (split, Tolerance.SPLIT_CALLS)],
)
@pytest.mark.parametrize("tolerated", [True, False], ids=["tolerated", "not tolerated"])
def test_parallel_calls_in_whatever_form_give_one_context(
    told: Callable[[dict[str, Any]], list[dict[str, Any]]], difference: Tolerance | None, tolerated: bool
) -> None:

    async def scenario(it: World) -> None:
        message, _ = await it.ask(START)
        chat = [*START, *told(message)]
        answer, _ = await it.ask(chat)
        await it.ask([*START, *in_order(message), answer, {"role": "user", "content": "So?"}])

    dialect = Dialect(SAFE if tolerated else SAFE - {difference})
    session = run(scenario, [BOTH, letters("Done."), letters("Yes.")], dialect=dialect)
    text = RENDERER.decode(session.tree.path_ids(1))
    one, other = text.index('result of {"command":"a"}'), text.index('result of {"command":"b"}')
    if difference is None or tolerated:
        assert [r.parent for r in session.records] == [None, 0, 1] and one < other
        assert session.ledger.notes == ({f"tolerated: {difference}": 1} if difference else {})
    elif difference is Tolerance.REORDERED_RESULTS:
        assert [r.parent for r in session.records] == [None, 0, None] and other < one
    else:
        assert [r.parent for r in session.records] == [None, None, None]
        assert session.ledger.notes == {"request rendered from scratch": 1, ANEW: 1}
    assert 0 in session.continued


def test_what_the_template_cannot_extend_is_rendered_from_scratch_and_is_known_from_then_on() -> None:
    made_up = {"role": "assistant", "content": "This was never sampled."}

    async def scenario(it: World) -> None:
        message, _ = await it.ask(START)
        for tool_call in message["tool_calls"]:
            tool_call["function"]["arguments"] = '{"command": "ls", "timeout": 120}'
        chat = [*START, message, *results(message), made_up, {"role": "user", "content": "y"}]
        answer, _ = await it.ask(chat)
        await it.ask([*chat, answer, {"role": "user", "content": "z"}])
        await it.ask([*START, message, *results(message)])

    session = run(scenario, [call("ls"), letters("two"), letters("three"), letters("four")])
    assert [(r.parent, r.answers) for r in session.records] == [(None, ()), (None, (0,)), (1, ()), (0, ())]
    assert session.continued == {0, 1}
    text = RENDERER.decode(session.tree.path_ids(2))
    assert "timeout" in text, "rendered as the harness tells it, so that nothing is overlooked there"
    assert session.ledger.notes == {ANEW: 1, "tolerated: inserted arguments": 1}


def test_a_nonce_in_the_system_prompt_is_taken_out_and_logged_once() -> None:
    dialect = Dialect(stabilise=(Rewrite("billing line", re.compile(r"^billing: \w+\n")),))

    def chat(nonce: str, *more: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"billing: {nonce}\nBe good."}, START[1], *more]

    async def scenario(it: World) -> None:
        told: list[dict[str, Any]] = []
        for nonce in ("aa", "bb", "cc"):
            message, _ = await it.ask(chat(nonce, *told))
            told += [message, {"role": "user", "content": "So?"}]
        assert all("billing" not in RENDERER.decode(p.prompt_ids) for p in it.prompts)

    session = run(scenario, [letters(w) for w in ("one", "two", "three")], dialect=dialect)
    assert [r.parent for r in session.records] == [None, 0, 1]
    assert session.ledger.notes == {"taken out of prompts: billing line": 1}
    assert session.records[0].messages[0] == Message("system", "Be good.")


def test_interleaved_agents_and_older_siblings_attach_where_they_belong() -> None:
    def agent(name: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"You are {name}."}, START[1]]

    async def scenario(it: World) -> None:
        chats = {name: agent(name) for name in ("main", "sub", "other sub")}
        for _ in range(2):
            for name, chat in chats.items():
                message, _ = await it.ask(chat)
                chats[name] = [*chat, message, *results(message)]
        older = chats["main"][:4]
        await it.ask([*older, {"role": "user", "content": "Back to where we were."}])

    session = run(scenario, [call(f"ls {k}") for k in range(7)])
    assert [r.parent for r in session.records] == [None, None, None, 0, 1, 2, 0]
    assert session.tree.leaf_calls() == [3, 4, 5, 6]
    assert [session.tree.parent_call(k) for k in range(7)] == [None, None, None, 0, 1, 2, 0]
