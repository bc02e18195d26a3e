"""What holds for every wire alike: whose request it is, who answers it, how it is sampled, and the same tree."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar

import anthropic
import numpy as np
import openai
import pytest
from google import genai

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.proxy.calls import FrozenModel
from clawgym_env.proxy.session import Session
from clawgym_env.types import Generation, Sampling, TokenArray
from tests.proxy_world import RENDERER, START, World, letters, raw, run, world

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "policy", "input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 64},
    "/v1beta/models/policy:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}
EACH_ROUTE = pytest.mark.parametrize("route", list(ROUTES))


def says(text: str) -> ScriptedEngine:
    """A model that says one thing for ever."""
    return ScriptedEngine(lambda request, turn: RENDERER.encode_reply(text))


@EACH_ROUTE
@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
def test_a_key_names_a_rollout_where_the_path_does_not(route: str, header: str) -> None:
    async def scenario(it: World) -> None:
        other = Session("r2", it.engine, RENDERER)
        it.proxy.register(other)
        key = f"Bearer {other.key}" if header == "authorization" else other.key
        answer = await it.http.post(it.server.base_url + route, json=ROUTES[route], headers={header: key})
        assert answer.status_code == 200
        assert len(other.records) == 1
        it.proxy.unregister("r2")
        late = await it.http.post(it.server.base_url + route, json=ROUTES[route], headers={header: key})
        assert late.status_code == 404
        assert "belongs to no rollout" in late.text

    assert run(scenario, [letters("a")]).records == []


@EACH_ROUTE
def test_a_rollouts_own_listener_names_it(route: str) -> None:
    async def scenario(it: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await it.server.attach("r1", listener)
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            answer = await it.http.post(base + route, json=ROUTES[route])
            assert answer.status_code == 200
            await it.server.close("r1")

    assert len(run(scenario, [letters("a")]).records) == 1


def test_requests_that_sample_nothing_leave_no_trace() -> None:
    async def scenario(it: World) -> None:
        base = f"{it.server.base_url}/rollout/r1"
        for path in ("", "/v1", "/v1/messages", "/v1/responses", "/v1beta/models/policy:generateContent"):
            probe = await it.http.head(base + path)
            assert (probe.status_code, probe.content) == (200, b"")
        gone = await it.http.head(f"{it.server.base_url}/rollout/nobody/v1/messages")
        assert gone.status_code == 404
        assert [m.id async for m in it.client.models.list()] == ["policy", "judge"]
        assert (await it.client.models.retrieve("anything")).id == "anything"
        async with anthropic.AsyncAnthropic(base_url=base, api_key="x", http_client=plain_client()) as client:
            assert [m.id async for m in client.models.list()] == ["policy", "judge"]
        with genai.Client(api_key="x", http_options={"base_url": base}) as gemini:
            listed = await asyncio.to_thread(lambda: [m.name for m in gemini.models.list()])
            assert listed == ["models/policy", "models/judge"]
        counted = await it.http.post(f"{base}/v1/messages/count_tokens", json=CHAT)
        assert counted.json()["input_tokens"] > 0

    frozen = {"judge": FrozenModel(says("ok"), RENDERER), "claude-*": FrozenModel(says("ok"), RENDERER)}
    session = run(scenario, [], frozen=frozen)
    assert session.records == [] and session.frozen_calls == [] and session.ledger.notes == {}


def test_a_frozen_model_answers_its_names_and_never_trains() -> None:
    async def scenario(it: World) -> None:
        reply, _ = await it.ask(START)
        aside = await it.client.chat.completions.create(model="small-fast", messages=START)
        assert aside.choices[0].message.content == "a title"
        text = aside.choices[0].message.content
        await it.ask([*START, reply, {"role": "user", "content": f"The other model says: {text}"}])

    frozen = {"small-*": FrozenModel(says("a title"), RENDERER, Sampling(max_tokens=8))}
    session = run(scenario, [letters("one"), letters("two")], frozen=frozen)
    assert len(session.records) == 2 and session.tree.parent_call(1) == 0
    (aside,) = session.frozen_calls
    assert (aside.model, aside.reply.content) == ("small-fast", "a title")
    assert session.ledger.captured == len(letters("one")) + len(letters("two"))
    sampled = np.concatenate([n.tokens for n in session.tree.nodes if n.call is not None])
    assert len(sampled) == session.ledger.captured


@pytest.mark.parametrize("policy", ["override", "honour"])
def test_who_says_how_answers_are_drawn(policy: str) -> None:
    asked = {"temperature": 0.25, "top_p": 0.5, "seed": 7, "max_tokens": 9, "extra_body": {"top_k": 3}}

    async def scenario(it: World) -> None:
        await it.ask(START, **asked)
        await it.ask([*START, {"role": "user", "content": "again"}], temperature=1.0)

    session = run(scenario, [letters("a"), letters("b")], sampling=Sampling(max_tokens=100), sampling_policy=policy)
    first, second = (r.call.sampling for r in session.records)
    note = "the run's sampling settings took the place of the harness's"
    if policy == "override":
        assert first == Sampling(max_tokens=9)
        assert session.ledger.notes == {note: 1, "request rendered from scratch": 1}
    else:
        assert first == Sampling(0.25, 0.5, 3, 9, 7)
        assert session.ledger.notes["sampled from a truncated distribution"] == 1 and note not in session.ledger.notes
    assert second == Sampling(max_tokens=100)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_sequence_ends_the_answer_and_its_tokens(stream: bool) -> None:
    said = letters("one STOP two")

    async def scenario(it: World) -> None:
        message, reason = await it.ask(START, stream=stream, stop=["STOP", "never"])
        assert (message["content"], reason) == ("one ", "stop")
        message.pop("parsed", None)
        await it.ask([*START, message, {"role": "user", "content": "go on"}])

    session = run(scenario, [said, letters("fine")])
    kept = session.records[0].call.sampled_tokens
    assert RENDERER.decode(said[:kept]) == "one STOP"
    assert session.ledger.aborted == len(said) - kept
    assert session.tree.path_ids(0)[-kept:].tolist() == said[:kept].tolist()
    assert session.tree.parent_call(1) == 0


class Asleep:
    """An engine that never answers."""

    max_context = 4096
    policy_version = 0

    async def generate(self, request: EngineRequest) -> Generation:
        await asyncio.sleep(3600)
        raise AssertionError

    async def aclose(self) -> None:
        pass


@EACH_ROUTE
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_takes_too_long_is_an_error_in_time(route: str, stream: bool) -> None:
    async def scenario(it: World) -> None:
        body = dict(ROUTES[route])
        path = route
        if "generateContent" in route:
            path = route.replace("generateContent", "streamGenerateContent") + "?alt=sse" if stream else route
        else:
            body["stream"] = stream
        answer = await it.http.post(f"{it.server.base_url}/rollout/r1{path}", json=body)
        assert answer.status_code == (200 if stream else 500)
        assert "no answer within 0.05 s" in answer.text

    session = run(scenario, Asleep(), call_timeout_s=0.05)
    assert session.failed.is_set() and session.in_flight == 0 and session.records == []


@EACH_ROUTE
def test_what_is_not_json_is_refused(route: str) -> None:
    async def scenario(it: World) -> None:
        url = f"{it.server.base_url}/rollout/r1{route}"
        form = await it.http.post(url, content=b"{}", headers={"content-type": "application/x-www-form-urlencoded"})
        assert form.status_code == 415 and "application/json" in form.text
        for body in (b"{", b"\xff\xfe{}", b"[]", b""):
            answer = await it.http.post(url, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and "error" in answer.json()
        assert (await it.http.get(url)).status_code == 405

    assert run(scenario, []).records == []


def plain_client() -> openai.DefaultAsyncHttpxClient:
    """A client of the kind that the SDKs take; loading the certificates would take longer than the test."""
    return openai.DefaultAsyncHttpxClient(verify=False)


class Conversation:
    """One conversation, told by each API's own client: a call with thinking, its result, an answer, a question."""

    SYSTEM, ASK, RESULT, MORE = "You are an agent.", "List the files.", "a.txt\nb.txt", "And now?"
    SCHEMA: ClassVar = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

    async def chat(self, base: str, *, stream: bool) -> None:
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="x", http_client=plain_client()) as client:
            tools: Any = [
                {"type": "function", "function": {"name": "bash", "description": "run", "parameters": self.SCHEMA}}
            ]
            messages: list[Any] = [{"role": "system", "content": self.SYSTEM}, {"role": "user", "content": self.ASK}]
            for turn in range(3):
                if stream:
                    async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                        message = (await events.get_final_completion()).choices[0].message
                else:
                    done = await client.chat.completions.create(model="m", messages=messages, tools=tools)
                    message = done.choices[0].message
                messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
                if turn == 0:
                    (call,) = message.tool_calls or []
                    messages[-1]["tool_calls"] = [
                        call.model_dump(exclude={"function": {"parsed_arguments"}, "index": True})
                    ]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": self.RESULT})
                else:
                    messages.append({"role": "user", "content": self.MORE})

    async def responses(self, base: str, *, stream: bool) -> None:
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="x", http_client=plain_client()) as client:
            tools: Any = [{"type": "function", "name": "bash", "description": "run", "parameters": self.SCHEMA}]
            history: list[Any] = [{"role": "user", "content": self.ASK}]
            for turn in range(3):
                asked: Any = {
                    "model": "m",
                    "instructions": self.SYSTEM,
                    "input": history,
                    "tools": tools,
                    "store": False,
                    "include": ["reasoning.encrypted_content"],
                }
                if stream:
                    async with client.responses.stream(**asked) as events:
                        response: Any = await events.get_final_response()
                else:
                    response = await client.responses.create(**asked)
                history += [
                    item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
                ]
                if turn == 0:
                    (called,) = (item for item in response.output if item.type == "function_call")
                    history.append({"type": "function_call_output", "call_id": called.call_id, "output": self.RESULT})
                else:
                    history.append({"role": "user", "content": self.MORE})

    async def messages(self, base: str, *, stream: bool) -> None:
        async with anthropic.AsyncAnthropic(base_url=base, api_key="x", http_client=plain_client()) as client:
            tools: Any = [{"name": "bash", "description": "run", "input_schema": self.SCHEMA}]
            history: list[Any] = [{"role": "user", "content": self.ASK}]
            for turn in range(3):
                asked: Any = {
                    "model": "m",
                    "system": self.SYSTEM,
                    "messages": history,
                    "tools": tools,
                    "max_tokens": 500,
                    "thinking": {"type": "enabled", "budget_tokens": 1024},
                }
                if stream:
                    async with client.messages.stream(**asked) as events:
                        message: Any = await events.get_final_message()
                else:
                    message = await client.messages.create(**asked)
                history.append({"role": "assistant", "content": message.content})
                if turn == 0:
                    (used,) = (block for block in message.content if block.type == "tool_use")
                    result = {"type": "tool_result", "tool_use_id": used.id, "content": self.RESULT}
                    history.append({"role": "user", "content": [result]})
                else:
                    history.append({"role": "user", "content": self.MORE})

    async def gemini(self, base: str, *, stream: bool) -> None:
        types = genai.types
        client = genai.Client(api_key="x", http_options={"base_url": base})
        declared = types.FunctionDeclaration(name="bash", description="run", parameters_json_schema=self.SCHEMA)
        config = types.GenerateContentConfig(
            system_instruction=self.SYSTEM,
            tools=[types.Tool(function_declarations=[declared])],
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )
        contents: list[Any] = [types.UserContent(self.ASK)]
        for turn in range(3):
            if stream:
                parts: list[Any] = []
                async for chunk in await client.aio.models.generate_content_stream(
                    model="m", contents=contents, config=config
                ):
                    parts += chunk.candidates[0].content.parts if chunk.candidates[0].content else []
                contents.append(types.Content(role="model", parts=parts))
            else:
                done = await client.aio.models.generate_content(model="m", contents=contents, config=config)
                contents.append(done.candidates[0].content)
            if turn == 0:
                (called,) = (p.function_call for p in contents[-1].parts if p.function_call)
                contents.append(
                    types.UserContent(
                        [types.Part.from_function_response(name=called.name, response={"output": self.RESULT})]
                    )
                )
            else:
                contents.append(types.UserContent(self.MORE))
        await client.aio.aclose()


def shape(session: Session) -> list[tuple[int | None, list[int], int | None]]:
    """A tree, node for node."""
    return [(n.parent, n.tokens.tolist(), n.call) for n in session.tree.nodes]


def test_one_conversation_through_four_wires_gives_one_tree() -> None:
    looks = "<think>\nLook first.\n</think>\n\nI will look.\n"
    calls = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    answers: list[TokenArray] = [raw(looks + calls), letters("Two files."), letters("Nothing more.")]

    async def told(by: str, stream: bool) -> Session:
        async with asyncio.timeout(30), world(answers) as it:
            await getattr(Conversation(), by)(f"{it.server.base_url}/rollout/r1", stream=stream)
        return it.session

    sessions = {
        (by, stream): asyncio.run(told(by, stream))
        for by in ("chat", "responses", "messages", "gemini")
        for stream in (False, True)
    }
    first = sessions["chat", False]
    assert [r.parent for r in first.records] == [None, 0, 1]
    for session in sessions.values():
        assert shape(session) == shape(first)
        assert session.ledger.notes == first.ledger.notes == {}
        assert [r.messages for r in session.records] == [r.messages for r in first.records]


def test_ten_thousand_dropped_connections_leave_nothing_behind() -> None:
    """Opened and dropped: before a byte, in mid-header, in mid-body, and while an answer is being made."""
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
    head = b"POST /rollout/r1/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    begins = [b"", head, head + b"content-length: 900\r\n\r\n" + body, head + b"content-length: 68\r\n\r\n" + body]
    assert len(body) == 68

    async def one(it: World, k: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", int(it.server.base_url.rpartition(":")[2]))
        writer.write(begins[k % len(begins)])
        if k % 3:
            await writer.drain()
        writer.transport.abort()

    async def scenario(it: World) -> None:
        other = Session("r2", says("still here"), RENDERER)
        it.proxy.register(other)
        for start in range(0, 10_000, 100):
            await asyncio.gather(*(one(it, k) for k in range(start, start + 100)))
        async with asyncio.timeout(10):
            while it.session.in_flight:  # noqa: ASYNC110 - nothing tells when the last one goes
                await asyncio.sleep(0.01)
        answer = await it.http.post(f"{it.server.base_url}/rollout/r2/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "still here"
        ours = {t for t in asyncio.all_tasks() if "Exchange" in repr(t) or "Session" in repr(t)}
        assert not ours

    session = run(scenario, Asleep(), limit_s=240)
    assert session.records == [] and session.ledger.captured == 0 and not session.failed.is_set()
