"""The model boundary over real sockets, driven by the official client: one conversation is one chain of sampled ids."""

from __future__ import annotations

import asyncio
import copy
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from clawgym_env.dialect import Dialect, Tolerance
from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import StepwiseEngine
from clawgym_env.proxy.session import Session
from clawgym_env.tree.pack import pack, paths
from clawgym_env.types import Budget, Sampling, TokenArray
from tests.proxy_world import RENDERER, START, TOOLS, World, call, letters, raw, run

Chat = list[dict[str, Any]]


def result(message: dict[str, Any], content: str, k: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][k]["id"], "content": content}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_conversation_is_one_chain_of_the_sampled_ids(stream: bool) -> None:
    spelled = '<tool_call>\n{"name": "bash", "arguments": {"command": "l'
    answers = [
        np.concatenate([raw(spelled), letters('s -la"}}\n')[:-1], raw("</tool_call><|im_end|>")]),
        call("cat a.txt", "Found one."),
        letters("Done: zażółć \U0001f600"),
    ]

    async def scenario(it: World) -> None:
        chat = copy.deepcopy(START)
        for k in range(3):
            message, finish = await it.ask(chat, stream=stream)
            assert finish == ("stop" if k == 2 else "tool_calls")
            chat.append(message)
            if k < 2:
                chat.append(result(message, f"output {k}"))
        assert [m.get("content") for m in chat if m["role"] == "assistant"] == [
            None,
            "Found one.",
            "Done: zażółć \U0001f600",
        ]

    session = run(scenario, answers)
    tree = session.tree
    assert [tree.parent_call(k) for k in range(3)] == [None, 0, 1] and tree.leaf_calls() == [2]
    (path,) = paths(pack(tree))
    packed = pack(tree)
    assert len(path.index) == len(packed) == tree.unique_tokens
    for k, answer in enumerate(answers):
        assert packed.tokens[packed.call == k].tolist() == answer.tolist()
        assert session.records[k].call.sampled_tokens == len(answer)
    assert session.ledger.as_dict()["notes"] == {}
    assert session.ledger.captured == sum(map(len, answers))
    assert [r.parent for r in session.records] == [None, 0, 1]
    assert [len(r.messages) for r in session.records] == [2, 1, 1]


def test_streamed_and_whole_calls_share_one_tree() -> None:
    async def scenario(it: World) -> None:
        first, _ = await it.ask(START, stream=True)
        await it.ask([*START, first, result(first, "x")], stream=False)

    session = run(scenario, [call("ls"), letters("Done.")])
    assert session.tree.parent_call(1) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_identical_prompts_are_siblings_and_the_latest_is_continued(stream: bool) -> None:
    async def scenario(it: World) -> None:
        for _ in range(2):
            message, _ = await it.ask(START, stream=stream)
        await it.ask([*START, message, result(message, "x")], stream=stream)

    session = run(scenario, [call("ls"), call("ls"), letters("Done.")])
    tree = session.tree
    assert tree.nodes[tree.call_end[0]].parent == tree.nodes[tree.call_end[1]].parent
    assert tree.leaf_calls() == [0, 2] and tree.parent_call(2) == 1
    assert session.ledger.captured == 2 * len(call("ls")) + len(letters("Done."))


def test_parallel_tool_calls_are_all_kept_in_order() -> None:
    both = raw(
        'Two.\n<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "b"}}\n</tool_call><|im_end|>'
    )
    messages = []

    async def scenario(it: World) -> None:
        for stream in (False, True):
            message, finish = await it.ask(START, stream=stream)
            assert finish == "tool_calls"
            messages.append(message)
        a, b = result(message, "A", 0), result(message, "B", 1)
        await it.ask([*START, message, b, a])  # results in the order of completion

    session = run(scenario, [both, both, letters("Done.")])
    for message in messages:
        assert [json.loads(c["function"]["arguments"])["command"] for c in message["tool_calls"]] == ["a", "b"]
    ids = [c["id"] for m in messages for c in m["tool_calls"]]
    assert len(set(ids)) == 4 and all(i.isalnum() for i in ids)
    assert session.tree.parent_call(2) == 1


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def apply(message: dict[str, Any]) -> None:
        for tool_call in message["tool_calls"]:
            change(tool_call)

    return apply


def arguments(make: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], None]:
    def change(tool_call: dict[str, Any]) -> None:
        tool_call["function"]["arguments"] = make(json.loads(tool_call["function"]["arguments"]))

    return rewritten(change)


ECHOES: dict[str, tuple[Callable[[dict[str, Any]], Any], Tolerance | None]] = {
    "argument spacing": (arguments(lambda a: json.dumps(a, indent=3)), None),
    "key order": (arguments(lambda a: json.dumps(dict(reversed(a.items())))), None),
    "escaped characters": (arguments(lambda a: json.dumps(a, ensure_ascii=True)), None),
    "list content": (lambda m: m.update(content=[{"type": "text", "text": m["content"]}]), None),
    "an id minted anew": (rewritten(lambda c: c.update(id="toolu_01")), None),
    "extra nulls": (lambda m: m.update(refusal=None, audio=None, function_call=None, annotations=[]), None),
    "empty reasoning": (lambda m: m.update(reasoning_content=""), None),
    "trimmed content": (lambda m: m.update(content=m["content"].strip() + "\n"), Tolerance.TRIMMED_TEXT),
    "null content": (lambda m: m.update(content=None), Tolerance.DROPPED_TEXT),
    "no content": (lambda m: m.pop("content"), Tolerance.DROPPED_TEXT),
    "an inserted default": (arguments(lambda a: json.dumps({**a, "timeout": 120})), Tolerance.INSERTED_ARGUMENTS),
    "broken arguments emptied": (arguments(lambda a: "{}"), Tolerance.REWRITTEN_ARGUMENTS),
}


@pytest.mark.parametrize("tolerated", [True, False], ids=["tolerated", "not tolerated"])
@pytest.mark.parametrize("name", list(ECHOES))
def test_an_echo_that_is_not_verbatim_grafts_where_that_is_tolerated(name: str, tolerated: bool) -> None:
    change, difference = ECHOES[name]
    tolerates = frozenset(Tolerance) if tolerated else frozenset(Tolerance) - {difference}
    answer = raw(
        'Look:\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls ż", "cwd": "/"}}\n</tool_call><|im_end|>'
    )

    async def scenario(it: World) -> None:
        message, _ = await it.ask(START)
        change(message)
        await it.ask([*START, message, {**result(message, "a.txt")}])
        # The next turn sees the echo in the middle of its history.
        await it.ask([*START, message, result(message, "a.txt"), {"role": "assistant", "content": "So."},
                      {"role": "user", "content": "Go on."}])  # fmt: skip

    session = run(scenario, [answer, letters("So."), letters("Done.")], dialect=Dialect(tolerates))
    assert pack(session.tree).tokens[pack(session.tree).call == 0].tolist() == answer.tolist()
    if difference is None or tolerated:
        assert [r.parent for r in session.records] == [None, 0, 1] and session.tree.leaf_calls() == [2]
        assert session.ledger.notes == ({f"tolerated: {difference}": 2} if difference else {})
    else:
        assert [r.parent for r in session.records] == [None, None, 1] and session.tree.leaf_calls() == [0, 2]
        assert session.ledger.notes == {"request rendered from scratch": 1}


@pytest.mark.parametrize("change", ["system", "user", "tools", "answer"])
def test_a_rewritten_history_is_a_branch_not_an_error(change: str) -> None:
    async def scenario(it: World) -> None:
        message, _ = await it.ask(START)
        chat, more = copy.deepcopy([*START, message, {"role": "user", "content": "More."}]), {}
        if change == "tools":
            more["tools"] = TOOLS * 2
        else:
            chat[{"system": 0, "user": 1, "answer": 2}[change]]["content"] = "rewritten"
        await it.client.chat.completions.create(model="policy", messages=chat, **{"tools": TOOLS, **more})  # type: ignore[call-overload]

    session = run(scenario, [letters("First."), letters("Second.")])
    assert session.records[1].parent is None and session.tree.parent_call(1) is None
    assert session.tree.leaf_calls() == [0, 1]
    assert session.ledger.notes == {"request rendered from scratch": 1}
    packed = pack(session.tree)
    assert packed.tokens[packed.call == 1].tolist() == letters("Second.").tolist()
    assert session.tree.unique_tokens < session.tree.total_tokens, "what is still equal is shared"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_malformed_tool_json_stays_as_the_policy_wrote_it(stream: bool) -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": oops\n</tool_call>'

    async def scenario(it: World) -> None:
        message, finish = await it.ask(START, stream=stream)
        assert (message["content"], finish, message.get("tool_calls")) == (text, "stop", None)
        await it.ask([*START, message, {"role": "user", "content": "That was no JSON."}], stream=stream)

    session = run(scenario, [raw(text + "<|im_end|>"), letters("Sorry.")])
    assert session.tree.parent_call(1) == 0


@pytest.mark.parametrize("value", ["123456789012345678901234567890", '"\\ud83d"', "NaN", "[" * 400 + "]" * 400])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_arguments_that_only_python_reads_are_answered_and_committed(stream: bool, value: str) -> None:
    """They used to fail after the call was in the tree: the answer was lost and the rollout with it."""
    answer = raw(f'<tool_call>\n{{"name": "bash", "arguments": {{"x": {value}}}}}\n</tool_call><|im_end|>')

    async def scenario(it: World) -> None:
        message, finish = await it.ask(START, stream=stream)
        assert finish == "tool_calls"
        assert message["tool_calls"][0]["function"]["arguments"] == f'{{"x": {value}}}'
        await it.ask([*START, message, result(message, "ok")], stream=stream)

    session = run(scenario, [answer, letters("Done.")])
    assert session.tree.parent_call(1) == 0 and not session.failed.is_set()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_truncated_answer_says_length_and_runs_nothing(stream: bool) -> None:
    whole = raw('<tool_call>\n{"name": "bash", "arguments": {"command": "rm -rf /tmp/x"}}\n</tool_call><|im_end|>')
    cut = len(whole) - 4

    async def scenario(it: World) -> None:
        response = await it.http.post(
            it.url, json={"model": "policy", "messages": START, "tools": TOOLS, "max_tokens": cut, "stream": stream}
        )
        assert response.status_code == 200
        assert '"finish_reason":"length"' in response.text
        assert '"tool_calls"' not in response.text
        text = RENDERER.decode(whole[:cut])
        follow = [*START, {"role": "assistant", "content": text}, {"role": "user", "content": "You were cut."}]
        await it.ask(follow, stream=stream)

    session = run(scenario, [whole, letters("Again.")])
    first = session.records[0].call
    assert (first.finish_reason, first.sampled_tokens, first.sampling.max_tokens) == ("length", cut, cut)
    assert session.tree.parent_call(1) == 0


def test_the_runs_limits_bound_the_harnesses() -> None:
    async def scenario(it: World) -> None:
        await it.ask(START, max_tokens=500, temperature=0.1, top_p=0.3)
        await it.ask(START, max_completion_tokens=2)

    session = run(scenario, [letters("abcdefgh")] * 2, sampling=Sampling(0.7, max_tokens=5))
    first, second = (r.call.sampling for r in session.records)
    assert (first.max_tokens, second.max_tokens) == (5, 2)
    assert (first.temperature, first.top_p) == (0.7, 1.0)
    assert session.ledger.notes["the run's sampling settings took the place of the harness's"] == 1


def test_seeds_depend_on_the_prompt_and_its_repetition_only() -> None:
    other: Chat = [{"role": "user", "content": "Other."}]

    def seeds(order: list[Chat], seed: int) -> list[int | None]:
        found: list[int | None] = []

        async def scenario(it: World) -> None:
            for chat in order:
                await it.ask(chat)
            found.extend(r.call.sampling.seed for r in it.session.records)

        run(scenario, [letters("a")] * 3, seed=seed)
        return found

    a, a_again, b = seeds([START, START, other], 5)
    assert seeds([other, START, START], 5) == [b, a, a_again]
    assert len({a, a_again, b}) == 3
    assert seeds([START, START, other], 6)[0] != a
    assert all(s is not None and 0 <= s < 2**63 for s in seeds([START], -1) + seeds([START], 2**70))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("budget", [Budget(max_calls=1), Budget(max_tokens=3)], ids=["calls", "tokens"])
def test_a_met_budget_ends_in_an_error(budget: Budget, stream: bool) -> None:
    async def scenario(it: World) -> None:
        await it.ask(START)
        assert not it.session.exhausted.is_set()
        with pytest.raises(openai.BadRequestError) as caught:
            await it.ask(START, stream=stream)
        assert caught.value.code == "rollout_budget_exhausted"
        assert it.session.exhausted.is_set()

    session = run(scenario, [letters("abcdef")] * 2, budget=budget)
    assert len(session.records) == 1 and session.ledger.captured == (7 if budget.max_tokens > 3 else 3)
    assert not session.failed.is_set()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_past_the_context_is_a_400_that_harnesses_compact_on(stream: bool) -> None:
    async def scenario(it: World) -> None:
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is 40 tokens") as caught:
            await it.ask(START, stream=stream)
        assert caught.value.code == "context_length_exceeded"

    session = run(scenario, [letters("a")], max_context=40)
    assert session.records == [] and not session.failed.is_set() and session.served == 0
    assert [n for n in session.ledger.notes if n.startswith("refused: This model's maximum context length")]


def test_the_context_bounds_the_answer() -> None:
    async def scenario(it: World) -> None:
        await it.ask(START)

    probe = run(scenario, [letters("abcdefgh")])
    length = probe.records[0].call.prompt_tokens
    call_facts = run(scenario, [letters("abcdefgh")], max_context=length + 3).records[0].call
    assert (call_facts.sampled_tokens, call_facts.finish_reason) == (3, "length")


def test_concurrent_rollouts_do_not_mix() -> None:
    names = [f"r{k}" for k in range(8)]

    class Dawdling(ScriptedEngine):
        async def generate(self, request: EngineRequest) -> Any:
            await asyncio.sleep(zlib.crc32(request.prompt_ids.tobytes()) % 5 / 1000)
            return await super().generate(request)

    def script(request: EngineRequest, turn: int) -> TokenArray:
        return call(f"{request.rollout_id} turn {turn}") if turn < 3 else letters(f"{request.rollout_id} done")

    engine = Dawdling(script)
    sessions = [Session(name, engine, RENDERER) for name in names]

    async def converse(it: World, session: Session, stream: bool) -> None:
        client = it.client.with_options(base_url=f"{it.server.base_url}/rollout/{session.rollout_id}/v1")
        mine = World(it.proxy, it.server, session, client, it.http, engine)
        chat = copy.deepcopy(START)
        for turn in range(4):
            message, _ = await mine.ask(chat, stream=stream)
            chat.append(message)
            if turn < 3:
                assert json.loads(message["tool_calls"][0]["function"]["arguments"])["command"].startswith(
                    session.rollout_id
                )
                chat.append(result(message, f"{session.rollout_id} {turn}"))
        assert message["content"] == f"{session.rollout_id} done"

    async def scenario(it: World) -> None:
        for session in sessions:
            it.proxy.register(session)
        await asyncio.gather(*(converse(it, s, stream=k % 2 == 0) for k, s in enumerate(sessions)))

    run(scenario, engine, rollout="other")
    for session in sessions:
        assert [r.parent for r in session.records] == [None, 0, 1, 2]
        assert session.tree.leaf_calls() == [3]
        text = RENDERER.decode(session.tree.path_ids(3))
        assert not any(name in text for name in names if name != session.rollout_id)


def test_calls_of_one_rollout_may_be_pending_together() -> None:
    """Sub-agents: answers go to their own call, tool-call ids differ, and both are in the tree."""

    async def scenario(it: World) -> None:
        chats = [[*START, {"role": "user", "content": f"Agent {k}."}] for k in range(2)]
        asks = [asyncio.create_task(it.ask(chat)) for chat in chats]
        first, second = await it.stepwise.next_call(), await it.stepwise.next_call()
        it.stepwise.answer(second, call("second"))
        it.stepwise.answer(first, call("first"))
        messages = [m for m, _ in await asyncio.gather(*asks)]
        ids = [m["tool_calls"][0]["id"] for m in messages]
        assert len(set(ids)) == 2
        agents = {p.request.chat.messages[-1].content: word for p, word in ((first, "first"), (second, "second"))}
        for k, message in enumerate(messages):
            said = json.loads(message["tool_calls"][0]["function"]["arguments"])["command"]
            assert said == agents[f"Agent {k}."]

    session = run(scenario, StepwiseEngine(max_context=4096))
    assert session.tree.leaf_calls() == [0, 1] and session.in_flight == 0


def test_pending_calls_count_towards_the_budget() -> None:
    async def scenario(it: World) -> None:
        pending = asyncio.create_task(it.ask(START))
        waiting = await it.stepwise.next_call()
        with pytest.raises(openai.BadRequestError, match="budget of 1 calls"):
            await it.ask([*START, {"role": "user", "content": "Another question."}])
        it.stepwise.answer(waiting, letters("a"))
        await pending

    assert len(run(scenario, StepwiseEngine(max_context=4096), budget=Budget(max_calls=1)).records) == 1
