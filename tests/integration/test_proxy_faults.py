"""What goes wrong at the model boundary: absent, broken and departing clients, failing engines, ended rollouts.

In each case the answer is a clear error or a committed call, never half of one.
"""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import PendingCall, StepwiseEngine
from clawgym_env.errors import EngineError, ProxyError
from clawgym_env.proxy import exchange
from clawgym_env.proxy.session import Session
from clawgym_env.types import Generation
from tests.proxy_world import RENDERER, START, TOOLS, World, call, letters, run

STREAMING = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
BODY: dict[str, Any] = {"model": "policy", "messages": START, "tools": TOOLS}


def slow() -> StepwiseEngine:
    """An engine that answers when the test says so."""
    return StepwiseEngine(max_context=4096)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the server's state has no event of its own
        await asyncio.sleep(0.002)


@asynccontextmanager
async def pending(it: World, *, stream: bool) -> AsyncIterator[tuple[asyncio.Task[httpx.Response], PendingCall]]:
    """A raw request whose generation has begun."""
    task = asyncio.create_task(it.http.post(it.url, json={**BODY, "stream": stream}))
    try:
        yield task, await it.stepwise.next_call()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- attribution ---


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/chat/completions", 404, "unattributed"),
        ("/rollout/nobody/v1/chat/completions", 404, "unknown_rollout"),
        ("/rollout/gone/v1/chat/completions", 410, "rollout_ended"),
        ("/rollout/r1/v1/embeddings", 404, "unknown_path"),
        ("/rollout/r1/chat/completions", 404, "unknown_path"),
        ("/rollout/r1", 404, "unknown_path"),
    ],
)
@STREAMING
def test_a_call_that_belongs_to_no_live_rollout_is_refused(path: str, status: int, code: str, stream: bool) -> None:
    async def scenario(it: World) -> None:
        it.proxy.register(Session("gone", it.engine, RENDERER))
        it.proxy.unregister("gone")
        it.proxy.unregister("gone")
        response = await it.http.post(it.server.base_url + path, json={**BODY, "stream": stream})
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["code"] == code and error["message"]

    assert run(scenario, [letters("a")]).records == []


def test_the_clients_see_typed_errors() -> None:
    async def scenario(it: World) -> None:
        it.proxy.unregister("r1")
        with pytest.raises(openai.APIStatusError, match="has ended") as caught:
            await it.ask(START)
        assert caught.value.status_code == 410

    run(scenario, [letters("a")])


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_rollouts_own_listener_serves_that_rollout_only(kind: str, tmp_path: Path) -> None:
    async def scenario(it: World) -> None:
        it.proxy.register(Session("r2", it.engine, RENDERER))
        path = str(tmp_path / "s")
        if kind == "unix":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
            transport, base = httpx.AsyncHTTPTransport(uds=path), "http://box"
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            transport, base = httpx.AsyncHTTPTransport(), f"http://127.0.0.1:{listener.getsockname()[1]}"
        with listener:
            await it.server.attach("r1", listener)
            with pytest.raises(ProxyError, match="already"):
                await it.server.attach("r1", listener)
            async with httpx.AsyncClient(transport=transport) as http:
                own = await http.post(f"{base}/rollout/r1/v1/chat/completions", json=BODY)
                other = await http.post(f"{base}/rollout/r2/v1/chat/completions", json=BODY)
                models = await http.get(f"{base}/rollout/r2/v1/models")
            assert own.status_code == 200
            assert (other.status_code, other.json()["error"]["code"]) == (403, "wrong_rollout")
            assert models.status_code == 403
            await it.server.close("r1")
            await it.server.close("r1")
        if kind == "tcp":
            async with httpx.AsyncClient() as http:
                with pytest.raises(httpx.ConnectError):
                    await http.get(f"{base}/rollout/r1/v1/models")

    assert len(run(scenario, [letters("a")]).records) == 1


def test_a_live_rollout_id_cannot_be_registered_again() -> None:
    async def scenario(it: World) -> None:
        with pytest.raises(ProxyError, match=r"'r1' is live already"):
            it.proxy.register(Session("r1", it.engine, RENDERER))
        await it.ask(START)
        it.proxy.unregister("r1")
        again = Session("r1", it.engine, RENDERER)
        it.proxy.register(again)
        await it.ask(START)
        assert len(again.records) == len(it.session.records) == 1

    run(scenario, [letters("a")] * 2)


def test_other_routes_and_methods_leave_the_rollout_alone() -> None:
    async def scenario(it: World) -> None:
        models = await it.client.models.list()
        assert [m.id for m in models.data] == ["policy"]
        base = it.server.base_url
        assert (await it.http.head(f"{base}/rollout/r1/v1/models")).status_code == 200
        assert (await it.http.get(it.url)).status_code == 405
        assert (await it.http.get(base + "/")).status_code == 404
        assert (await it.http.delete(base + "/rollout/r1")).status_code == 404
        assert (await it.http.delete(it.url)).status_code == 405

    session = run(scenario, [letters("a")])
    assert session.records == [] and session.served == 0


# --- requests that cannot be served ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (orjson.dumps({**BODY, "tools": 5}), "tools must be an array"),
        (orjson.dumps({**BODY, "stream_options": 1}), "stream_options must be an object"),
        (orjson.dumps({**BODY, "n": 3, "stream": True}), "n cannot be honoured"),
        (orjson.dumps({**BODY, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "image_url"),
    ],
)
def test_a_bad_body_is_a_400_and_noted(body: bytes, message: str) -> None:
    async def scenario(it: World) -> None:
        response = await it.http.post(it.url, content=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        await it.ask(START)

    session = run(scenario, [letters("a")])
    assert len(session.records) == 1 and not session.failed.is_set()
    assert [n for n in session.ledger.notes if n.startswith("refused: ")]


def test_an_oversized_body_is_a_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 100_000)

    async def scenario(it: World) -> None:
        for size in (100_001, 8_000_000):
            response = await it.http.post(it.url, content=b" " * size)
            assert response.status_code == 413
            assert "100000 bytes" in response.json()["error"]["message"]
        await it.ask(START)

    assert len(run(scenario, [letters("a")]).records) == 1


def test_a_long_body_is_read_whole() -> None:
    chat = copy.deepcopy(START)
    chat[1]["content"] = "word " * 60_000 + "end"

    async def scenario(it: World) -> None:
        await it.ask(chat)

    session = run(scenario, [letters("a")], max_context=10_000_000)
    assert session.records[0].messages[1].content.endswith("word end")


# --- clients that go away ---


@STREAMING
def test_a_client_that_goes_away_cancels_its_generation(stream: bool) -> None:
    async def scenario(it: World) -> None:
        async with pending(it, stream=stream) as (task, waiting):
            assert it.session.in_flight == 1
            task.cancel()
            await until(waiting.answer.done)
            assert waiting.answer.cancelled()
        await until(lambda: it.session.in_flight == 0)
        # The rollout goes on.
        async with pending(it, stream=stream) as (task, waiting):
            it.stepwise.answer(waiting, letters("ab"))
            assert (await task).status_code == 200

    session = run(scenario, slow())
    assert len(session.records) == 1 and session.ledger.captured == 3
    assert session.ledger.notes == {"client went away while a call was pending": 1}
    assert not session.failed.is_set()


@STREAMING
def test_an_answer_that_comes_as_the_client_leaves_commits_nothing(stream: bool) -> None:
    """Client gone and generation done in the same turn of the event loop: still no call, and its tokens are counted."""

    class Stubborn(StepwiseEngine):
        async def generate(self, request: EngineRequest) -> Generation:
            work = asyncio.ensure_future(super().generate(request))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                while not work.done():  # as an engine that cannot be stopped in mid-batch
                    await asyncio.wait([work])
                return work.result()

    async def scenario(it: World) -> None:
        async with pending(it, stream=stream) as (task, waiting):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.05)
            it.stepwise.answer(waiting, letters("ab"))
            await until(lambda: it.session.in_flight == 0)

    session = run(scenario, Stubborn(max_context=4096))
    assert session.records == [] and session.tree.unique_tokens == 0 and session.ledger.captured == 0
    assert session.ledger.aborted == 3


@STREAMING
def test_a_rollout_that_ends_during_a_call_keeps_its_record(stream: bool) -> None:
    async def scenario(it: World) -> None:
        async with pending(it, stream=stream) as (task, waiting):
            it.proxy.unregister("r1")
            it.stepwise.answer(waiting, letters("ab"))
            response = await task
        assert ("has ended" in response.text and "[DONE]" in response.text) or not stream
        assert response.status_code == (200 if stream else 410)

    session = run(scenario, slow())
    assert session.records == [] and session.ledger.aborted == 3 and session.in_flight == 0


@pytest.mark.parametrize("api", ["gemini", "responses"])
def test_an_error_after_an_answers_pieces_leaves_the_stream_well_formed(api: str) -> None:
    gemini = {"contents": [{"role": "user", "parts": [{"text": "Go."}]}]}
    path, body = {
        "gemini": ("/v1beta/models/policy:streamGenerateContent", gemini),
        "responses": ("/v1/responses", {"model": "policy", "input": "Go.", "stream": True}),
    }[api]

    async def scenario(it: World) -> None:
        url = f"{it.server.base_url}/rollout/r1{path}"
        task = asyncio.create_task(it.http.post(url, json=body))
        waiting = await it.stepwise.next_call()
        it.proxy.unregister("r1")
        it.stepwise.answer(waiting, call("ls", "I look."))
        told = (await task).text
        if api == "gemini":
            first, last = orjson.loads(told)
            assert first["candidates"] and "has ended" in last["error"]["message"]
        else:
            events = [orjson.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
            assert [e["sequence_number"] for e in events] == list(range(len(events))) and len(events) > 10
            assert [e["type"] for e in (events[0], events[-1])] == ["response.created", "response.failed"]

    assert run(scenario, slow()).records == []


def test_a_rollout_that_ends_while_a_body_comes_in_is_a_410() -> None:
    body = orjson.dumps(BODY)

    async def scenario(it: World) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield body[:9]
            await asyncio.sleep(0.1)
            it.proxy.unregister("r1")
            yield body[9:]

        response = await it.http.post(it.url, content=parts(), headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (410, "rollout_ended")

    session = run(scenario, [letters("a")])
    assert session.records == [] and not session.failed.is_set()


def test_leaving_the_server_ends_what_is_pending() -> None:
    async def scenario(it: World) -> None:
        it.http.timeout = httpx.Timeout(5)
        bodies = [{**BODY, "model": f"m{s}", "stream": s} for s in (False, True)]
        tasks = [asyncio.create_task(it.http.post(it.url, json=body)) for body in bodies]
        calls = [await it.stepwise.next_call() for _ in tasks]
        await it.server.__aexit__(None, None, None)
        assert all(c.answer.cancelled() for c in calls)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(o, httpx.HTTPError) or o.status_code == 500 for o in outcomes)  # type: ignore[union-attr]

    assert run(scenario, slow()).records == []


# --- slow and failing engines ---


def test_a_slow_answer_is_held_with_headers_at_once_and_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)

    async def scenario(it: World) -> None:
        async with it.http.stream("POST", it.url, json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            text = ""
            async for part in response.aiter_text():
                text += part
                if text == ": keep-alive\n\n" * 3:
                    it.stepwise.answer(await it.stepwise.next_call(), letters("ab"))
        assert text.endswith("data: [DONE]\n\n") and '"content":"ab"' in text
        # The official client reads over them.
        ask = asyncio.create_task(it.ask(START, stream=True))
        waiting = await it.stepwise.next_call()
        await asyncio.sleep(0.1)
        it.stepwise.answer(waiting, letters("ab"))
        message, finish = await ask
        assert (message["content"], finish) == ("ab", "stop")

    assert len(run(scenario, slow()).records) == 2


def failing(error: Exception, *, at_once: bool) -> ScriptedEngine:
    class Failing(ScriptedEngine):
        async def generate(self, request: EngineRequest) -> Generation:
            if not at_once:
                await asyncio.sleep(0.05)
            raise error

    return Failing(lambda *_: letters("a"))


@STREAMING
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("error", "told", "failure"),
    [
        (EngineError("CUDA is out of memory"), "the policy engine failed: CUDA", "CUDA is out of memory"),
        (ZeroDivisionError("our bug"), "internal error at the model boundary", "ZeroDivisionError: our bug"),
    ],
)  # fmt: skip
def test_a_failing_engine_is_an_error_of_the_rollout(
    stream: bool, at_once: bool, error: Exception, told: str, failure: str
) -> None:
    async def scenario(it: World) -> None:
        with pytest.raises(openai.APIError, match=told) as caught:
            await it.ask(START, stream=stream)
        if not stream:
            assert isinstance(caught.value, openai.InternalServerError) and caught.value.status_code == 500

    session = run(scenario, failing(error, at_once=at_once))
    assert session.failed.is_set() and session.failure == failure
    assert session.records == [] and session.in_flight == 0


def test_a_failed_stream_ends_in_an_error_event() -> None:
    async def scenario(it: World) -> None:
        response = await it.http.post(it.url, json={**BODY, "stream": True})
        first, done = response.text.removesuffix("\n\n").split("\n\n")
        assert orjson.loads(first.removeprefix("data: "))["error"]["code"] == "engine_error"
        assert done == "data: [DONE]"

    run(scenario, failing(EngineError("broken"), at_once=False))


@STREAMING
def test_an_answer_without_tokens_is_an_engine_error(stream: bool) -> None:
    async def scenario(it: World) -> None:
        async with pending(it, stream=stream) as (task, waiting):
            it.stepwise.answer(waiting, letters("a")[:0])
            assert "without a single token" in (await task).text

    session = run(scenario, slow())
    assert session.failed.is_set() and session.records == [] and session.in_flight == 0


# --- order of commitment ---


class Probe:
    """ASGI middleware that notes how many calls were committed whenever bytes go out."""

    def __init__(self, inner: Any, session: Session) -> None:
        self.inner, self.session = inner, session
        self.sent: list[tuple[bytes, int]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noting(event: Any) -> None:
            if event["type"] == "http.response.body":
                self.sent.append((event.get("body", b""), len(self.session.records)))
            await send(event)

        await self.inner(scope, receive, noting)


@STREAMING
def test_a_call_is_committed_before_its_terminal_event(stream: bool) -> None:
    probes: list[Probe] = []

    def wrap(inner: Any, session: Session) -> Probe:
        probes.append(Probe(inner, session))
        return probes[-1]

    async def scenario(it: World) -> None:
        body = {**BODY, "stream": stream, "stream_options": {"include_usage": True}}
        async with it.http.stream("POST", it.url, json=body) as response:
            async for part in response.aiter_bytes():
                if b'"finish_reason":"stop"' in part:
                    assert len(it.session.records) == 1

    run(scenario, [letters("ab")], wrap=wrap)
    (probe,) = probes
    terminal = [committed for body, committed in probe.sent if b'"finish_reason":"stop"' in body or b"[DONE]" in body]
    assert terminal and set(terminal) == {1}
    if stream:
        deltas = [committed for body, committed in probe.sent if b'"content":"ab"' in body]
        assert deltas == [0], "what was sent before can still be taken back"
