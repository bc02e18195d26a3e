"""Sub-agents in the harness suite: how they are used, a policy that uses one, and what its rollout must look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawgym_env.engines.base import EngineRequest
from clawgym_env.harnesses.base import Harness
from clawgym_env.types import Message, TokenArray, ToolCall
from tests.conformance.harness_play import Played, Script, say


@dataclass(frozen=True, slots=True, eq=False)
class Delegation:
    """How a harness's sub-agents are used.

    Attributes:
        harness: The harness with its sub-agents on.
        start: The call that starts a sub-agent on a task.
        wait: Result of that call -> the call that waits until the sub-agent has ended; ``None`` where none is needed:
            the result holds the sub-agent's answer, or that comes by itself.
    """

    harness: Harness
    start: Callable[[str], ToolCall]
    wait: Callable[[str], ToolCall | None] = lambda result: None


#: What a sub-agent is told and says, by which it and its answer are known.
PART, REPORT = "PART-SEVEN: write part.txt.", "REPORT-SEVEN: part.txt is written."


def delegate(by: Delegation, work: TokenArray, end: Callable[[str], TokenArray]) -> Script:
    """The main agent has a sub-agent do a part, waits for its report, and ends; that one works once and reports."""

    def script(request: EngineRequest, turn: int) -> TokenArray:
        messages = request.chat.messages
        told = "\n".join(m.content for m in messages if m.role != "assistant")
        results = [m.content for m in messages if m.role == "tool"]
        opening = "\n".join(m.content for m in messages[: _first_answer(messages)])
        if PART in opening:
            return end(REPORT) if results else work
        if REPORT in told:
            return end("All is done.")
        if not results:
            return say("", by.start(PART))
        waits = by.wait(results[0])
        return end("I wait for it.") if waits is None else say("", waits)

    return script


def _first_answer(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))


def check_delegated(played: Played) -> None:
    """Two agents, each with one whole conversation; the sub-agent's names the call that started it."""
    records = [r for r in played.rollout.records if r.call.kind != "side"]
    main = [r for r in records if r.call.kind == "main"]
    part = [r for r in records if r.call.kind == "subagent"]
    assert len(records) == len(main) + len(part), played
    for agent in main, part:
        assert [r.call.continues for r in agent] == [None, *(r.call.call_id for r in agent[:-1])], played
        assert len({(r.call.agent, r.call.segment) for r in agent}) == 1, played
    assert {r.call.spawned_by for r in part} == {main[0].call.call_id}, played
    assert {r.call.spawned_by for r in main} == {None}, played
    assert [r.reply.content for r in part[1:]] == [REPORT], played
    assert any(REPORT in m.content for r in main for m in r.messages), played
