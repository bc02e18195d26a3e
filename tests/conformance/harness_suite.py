"""What every harness must do at the model boundary, with the real program in real sandboxes.

Inherit :class:`HarnessSuite` in a class whose name begins with ``Test``, give it a harness, and override the hooks
where its defaults do not fit::

    class TestMine(HarnessSuite):
        def harness(self):
            return MyHarness()

A scripted policy plays against the harness; nothing is mocked. A harness that hangs fails the suite within a minute.
``CLAWGYM_FIRST_BYTE_S=150`` makes the slow answer as slow as a busy engine's.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.harnesses.base import Harness, Launch, LaunchContext
from clawgym_env.proxy import exchange
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Backend, Limits, SandboxSpec, get_backend
from clawgym_env.tasks import get_suite
from clawgym_env.tree.filters import Filters
from clawgym_env.types import Budget, Message, Sampling, Status, TokenArray, ToolCall
from tests.conformance.harness_delegation import Delegation, check_delegated, delegate
from tests.conformance.harness_play import (
    RENDERER,
    Before,
    Hung,
    Play,
    Played,
    Stage,
    descendants,
    descriptors,
    play,
    processes,
    raw,
    say,
    wait_until,
)

TASK = "builtin/count/1/train/00017"
FIRST_BYTE_S = float(os.environ.get("CLAWGYM_FIRST_BYTE_S", "2"))
#: Answers may take this long in training; no limit of the harness's own may lie below.
PATIENCE_S = 150.0
LONG_CALLS = 30
#: A sleep that no other process on this machine sleeps.
SLEEP = f"sleep {random.SystemRandom().randrange(10**6, 10**7)}.25"
#: An agent that leaves a process behind, floods its harness's output, and writes where it may not.
UNRULY = (
    f"setsid {SLEEP} >/dev/null 2>&1 & sleep 0.1; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' > left.txt",
    "head -c 3000000 /dev/zero | tr '\\0' x 2>/dev/null >/proc/$PPID/fd/1; true",
    "for p in /usr/clawgym-evil /opt/clawgym-evil /etc/clawgym-evil; do (echo x > $p) 2>/dev/null && echo yes || "
    "echo no; done > free.txt; echo x > /tmp/clawgym-evil; echo x > $HOME/evil; true",
)


class HarnessSuite(ABC):
    """See the module.

    Attributes:
        limit_s: Longest time that any one run may take.
        concurrency: Runs at once where a check does not need another number.
        documented: Ledger notes and drop reasons of an ordinary long run -> why they are there. They are compared by
            how they begin.
        thinking: Whether the harness sends the policy's thinking back.
        parallel: Whether it runs all calls of an answer with several.
        repairs: Whether it goes on after tool arguments that are no JSON object; if not, its run ends there.
        runs_whole_calls: Whether it runs those calls of an answer that came before the token limit cut it.
        compacts: Whether it shortens a conversation that outgrows the context; if not, its run ends there.
        small_context: Tokens beyond the first prompt in which it is to compact.
    """

    limit_s: ClassVar[float] = 20.0
    concurrency: ClassVar[int] = 3
    documented: ClassVar[Mapping[str, str]] = {}
    thinking: ClassVar[Literal["kept", "dropped"]] = "kept"
    parallel: ClassVar[bool] = True
    repairs: ClassVar[bool] = True
    runs_whole_calls: ClassVar[bool] = False
    compacts: ClassVar[bool] = True
    small_context: ClassVar[int] = 3_000
    _hung: ClassVar[int] = 0

    @abstractmethod
    def harness(self) -> Harness:
        """The harness, as most of its users run it."""

    def thinking_harness(self) -> Harness:
        """The harness with a model that thinks."""
        return self.harness()

    def shell(self, command: str) -> ToolCall:
        """The tool call that runs a shell command in the workspace."""
        shell = self.harness().info.shell
        assert shell is not None, "the harness names no tool that runs commands (HarnessInfo.shell)"
        return shell.call(command)

    def printed(self, result: str) -> str:
        """What a shell command printed, by the result of its call."""
        return result

    def end(self, text: str = "Done.") -> TokenArray:
        """The answer that ends a run."""
        shell = self.harness().info.shell
        last = shell.last(text) if shell is not None else Message("assistant", text)
        return say(last.content, *last.tool_calls)

    def unknown_tool(self) -> ToolCall:
        """A call of a tool that is not offered."""
        return ToolCall("no_such_tool", {"path": "x"})

    def delegation(self) -> Delegation | None:
        """How its sub-agents are used; ``None`` where it has none."""
        return None

    def results(self, played: Played) -> list[str]:
        """What its tools gave, in order, as the policy was told."""
        return played.results

    def asks_for_summary(self, asked: EngineRequest) -> bool:
        """Whether the harness asks for a summary of a conversation that outgrew the context."""
        return not asked.chat.tools

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        """The harness's own limits on waiting for an answer, as its launch configures them, in seconds."""
        return {}

    def backend(self) -> Backend:
        """Where it runs."""
        return get_backend("bubblewrap")

    def settings(self) -> RolloutSettings:
        """What most runs are run with."""
        return RolloutSettings(timeout_s=self.limit_s, grace_s=5.0, limits=Limits(wall_s=self.limit_s + 30.0))

    def play(
        self,
        *plays: Play,
        settings: RolloutSettings | None = None,
        max_context: int = 131_072,
        concurrency: int = 2,
        before: Before | None = None,
    ) -> dict[str, Played]:
        """Runs rollouts; once two runs have hung, no further one is tried."""
        if type(self)._hung >= 2:
            pytest.fail("not tried: the harness hung twice before")
        work = play(
            plays,
            self.backend(),
            settings or self.settings(),
            max_context=max_context,
            concurrency=concurrency,
            before=before,
        )
        try:
            return asyncio.run(work)
        except Hung:
            type(self)._hung += 1
            raise

    def steps(self, *commands: str) -> list[TokenArray]:
        """One shell command an answer, and the end."""
        return [*(say("", self.shell(c)) for c in commands), self.end()]

    @pytest.fixture(scope="class")
    def ordinary(self, request: pytest.FixtureRequest) -> dict[str, Played]:
        """What most checks look at."""
        suite: HarnessSuite = request.cls()
        return suite.ordinary_runs()

    def ordinary_runs(self) -> dict[str, Played]:
        """Runs that need no settings of their own, several at once."""
        harness, task = self.harness(), get_suite("builtin").get(TASK)
        together = asyncio.Barrier(2)

        async def meet(stage: Stage, asked: EngineRequest, turn: int) -> None:
            if asked.rollout_id.startswith("twin") and turn == 0:
                await together.wait()

        twins = {f"twin{x}": self.steps(*(f"echo {x * 3}{k} | tee -a seen.txt" for k in range(3))) for x in "ab"}
        return self.play(
            *(Play(name, harness, answers) for name, answers in twins.items()),
            Play("long", harness, self.steps(*(f"echo {k} > {k}.txt; echo step {k}" for k in range(LONG_CALLS - 1)))),
            Play("solver", harness, self.steps(*task.oracle), task),
            Play("idler", harness, [self.end("It is done.")], task),
            Play("parallel", harness, self.parallel_answers()),
            Play("unknown", harness, [say("", self.unknown_tool()), *self.steps("echo on > on.txt")]),
            Play("malformed", harness, self.malformed_answers()),
            Play("thinker", self.thinking_harness(), self.thinking_answers()),
            Play("unruly", harness, self.steps(*UNRULY, "echo on > on.txt")),
            concurrency=max(2, self.concurrency),
            before=meet,
        )

    def parallel_answers(self) -> list[TokenArray]:
        """Two calls in one answer, and the end."""
        calls = [self.shell(f"echo {x * 4} | tee {x}.txt") for x in "pq"]
        return [say("Both.", *calls), self.end()]

    def malformed_answers(self) -> list[TokenArray]:
        """Arguments that are no object, a call that works, one whose JSON is broken (it is text then), and the end."""
        name = self.shell("true").name
        return [
            raw(f'<tool_call>\n{{"name": "{name}", "arguments": "echo hi"}}\n</tool_call>'),
            say("", self.shell("echo on > on.txt")),
            raw(f'<tool_call>\n{{"name": "{name}", "arguments": {{"command": "echo}}\n</tool_call>'),
            self.end(),
        ]

    def thinking_answers(self) -> list[TokenArray]:
        """Thoughts before a call, before text with a call, and before the end."""
        return [
            say("", self.shell("echo one"), reasoning="First, one."),
            say("Now two.", self.shell("echo two > two.txt"), reasoning="Then\n\ntwo."),
            self.end(),
        ]

    def check_account(self, played: Played) -> None:
        """Nothing is lost and nothing is left over."""
        ledger = played.rollout.ledger
        assert ledger.captured == ledger.trained + sum(ledger.dropped.values()), played
        assert ledger.aborted == 0, played
        assert len(played.requests) == len(played.rollout.records), played

    def check_clean(self, played: Played) -> None:
        """One trajectory, every token of it trains, and nothing was remarkable but what is documented."""
        self.check_account(played)
        rollout = played.rollout
        remarks = [*rollout.ledger.notes, *rollout.ledger.dropped]
        assert [r for r in remarks if not r.startswith(tuple(self.documented))] == [], played
        if any("scratch" in key for key in self.documented):
            return
        main = [r for r in rollout.records if r.call.kind == "main"]
        assert self.trajectories(played) == 1, played
        assert [r.parent for r in main] == [None, *(r.call.call_id for r in main[:-1])], played
        assert {(r.call.agent, r.call.segment) for r in main} == {("main", 0)}, played

    def trajectories(self, played: Played) -> int:
        """How many ends the agent's conversation has in the tree; side calls, which drop out as such, are none."""
        records = played.rollout.records
        return sum(records[call].call.kind == "main" for call in played.rollout.tree.leaf_calls())

    def test_solves_a_task(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["solver"]
        assert played.rollout.status is Status.COMPLETED, played
        assert played.rollout.reward is not None and played.rollout.reward.passed, played
        self.check_clean(played)

    def test_ending_without_work_is_no_success(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["idler"]
        assert played.rollout.status is Status.COMPLETED, played
        assert played.rollout.reward is not None and not played.rollout.reward.passed, played

    def test_a_long_run_is_one_trajectory(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["long"]
        assert played.rollout.status is Status.COMPLETED, played
        assert len(played.rollout.records) == LONG_CALLS, played
        ends = [self.printed(r).strip().endswith(f"step {k}") for k, r in enumerate(self.results(played))]
        assert ends == [True] * (LONG_CALLS - 1), played
        assert sum(name != "given.txt" for name in played.workspace) == LONG_CALLS - 1
        self.check_clean(played)

    def test_runs_at_once_do_not_mix_and_share_their_first_prompt(self, ordinary: Mapping[str, Played]) -> None:
        one, other = (RENDERER.decode(ordinary[name].requests[0].prompt_ids) for name in ("twina", "twinb"))
        assert one == other, _difference(one, other)
        for own, others in ("ab", "ba"):
            played = ordinary[f"twin{own}"]
            assert played.rollout.status is Status.COMPLETED, played
            assert played.workspace["seen.txt"].split() == [f"{own * 3}{k}".encode() for k in range(3)], played
            assert not any(others * 3 in m.content for m in played.told), played
            self.check_clean(played)

    def test_parallel_calls(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["parallel"]
        assert played.rollout.status is Status.COMPLETED, played
        self.check_account(played)
        assert self.trajectories(played) == 1, played
        if self.parallel:
            assert (played.workspace["p.txt"], played.workspace["q.txt"]) == (b"pppp\n", b"qqqq\n"), played
            assert ["pppp" in r for r in self.results(played)] == [True, False], played
            assert ["qqqq" in r for r in self.results(played)] == [False, True], played

    def test_unknown_tool_is_answered(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["unknown"]
        assert played.rollout.status is Status.COMPLETED, played
        assert played.workspace.get("on.txt") == b"on\n", played
        self.check_account(played)

    def test_malformed_arguments(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["malformed"]
        self.check_account(played)
        assert played.rollout.status.scored, played
        if self.repairs:
            assert played.workspace.get("on.txt") == b"on\n", played
            assert len(played.rollout.records) >= 3, played
            assert self.trajectories(played) == 1, played

    def test_thinking(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["thinker"]
        assert played.rollout.status is Status.COMPLETED, played
        assert [r.reply.reasoning for r in played.rollout.records[:2]] == ["First, one.", "Then\n\ntwo."], played
        dropped = any("reasoning" in note for note in played.rollout.ledger.notes)
        assert dropped == (self.thinking == "dropped"), played
        self.check_account(played)
        assert self.trajectories(played) == 1, played

    def test_what_it_leaves_and_floods_is_contained(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["unruly"]
        assert played.rollout.status is Status.COMPLETED, played
        assert {"given.txt", "on.txt"} <= set(played.workspace), played
        assert played.workspace["free.txt"].split() == [b"no"] * 3, played
        assert SLEEP.encode() in played.workspace["left.txt"], played
        assert wait_until(lambda: not any(SLEEP in command for _, command in processes().values()))
        assert not Path("/usr/clawgym-evil").exists() and not Path("/tmp/clawgym-evil").exists()

    def test_sub_agents(self, ordinary: Mapping[str, Played]) -> None:
        by = self.delegation()
        if by is None:
            calls = [r.call for played in ordinary.values() for r in played.rollout.records]
            assert {c.agent for c in calls if c.kind != "side"} == {"main"}
            return
        script = delegate(by, say("", self.shell("echo part | tee part.txt")), self.end)
        settings = replace(self.settings(), filters=Filters(subagent_credit="broadcast"))
        played = self.play(Play("delegating", by.harness, script), settings=settings)["delegating"]
        assert played.rollout.status is Status.COMPLETED, played
        assert played.workspace.get("part.txt") == b"part\n", played
        self.check_account(played)
        assert [r for r in played.rollout.ledger.dropped if not r.startswith(tuple(self.documented))] == [], played
        check_delegated(played)

    def test_truncated_answer_runs_no_tool(self) -> None:
        """Of two calls the second is cut."""
        whole = say("", self.shell("echo ran > whole.txt"))
        cut = say("", self.shell("echo ran > whole.txt"), self.shell("echo ran > cut.txt; " + "true; " * 200))
        sampling = Sampling(max_tokens=max(len(whole) + 20, len(self.end())))
        plays = Play("cut", self.harness(), [cut, self.end()])
        played = self.play(plays, settings=replace(self.settings(), sampling=sampling))["cut"]
        assert played.rollout.records[0].call.finish_reason == "length", played
        assert played.rollout.status.scored, played
        assert set(played.workspace) == {"given.txt", *(["whole.txt"] if self.runs_whole_calls else [])}, played
        self.check_account(played)

    def test_small_context(self, ordinary: Mapping[str, Played]) -> None:
        first = len(ordinary["long"].requests[0].prompt_ids)
        made = "for i in $(seq 60); do echo line $i of a long file; done"

        def script(request: EngineRequest, turn: int) -> TokenArray:
            if self.asks_for_summary(request):
                return say(f"Until turn {turn} the file was read again and again, without an end; go on with it.")
            return self.steps(*[made] * 16)[min(turn, 16)]

        settings = replace(self.settings(), sampling=Sampling(max_tokens=512))
        played = self.play(
            Play("small", self.harness(), script), settings=settings, max_context=first + self.small_context
        )["small"]
        records = played.rollout.records
        self.check_account(played)
        if self.compacts:
            assert played.rollout.status is Status.COMPLETED, played
            assert "compaction" in {r.call.kind for r in records}, played
            assert [r.call.segment for r in records if r.call.kind == "main"][-1] >= 1, played
        else:
            assert played.rollout.status.scored, played
            assert {r.call.kind for r in records} == {"main"}, played

    def test_slow_first_byte(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if FIRST_BYTE_S < 10.0:
            monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.2)

        async def wait(stage: Stage, asked: EngineRequest, turn: int) -> None:
            if turn == 0:
                await asyncio.sleep(FIRST_BYTE_S)

        limit_s = self.limit_s + FIRST_BYTE_S
        settings = replace(self.settings(), timeout_s=limit_s, limits=Limits(wall_s=limit_s + 30.0))
        plays = Play("slow", self.harness(), self.steps("echo on > on.txt"))
        played = self.play(plays, settings=settings, before=wait)["slow"]
        assert played.rollout.status is Status.COMPLETED, played
        assert played.workspace.get("on.txt") == b"on\n", played
        assert len(played.rollout.records) == 2, played
        self.check_clean(played)

    def test_its_own_limits_are_patient(self) -> None:
        async def launch() -> Launch:
            harness = self.harness()
            async with await self.backend().create(SandboxSpec(mounts=tuple(harness.mounts()))) as box:
                context = LaunchContext("Wait.", f"{box.base_url}/rollout/1", "key", "policy", 32_768, 1_024, 600.0)
                return harness.launch(context, box)

        limits = self.idle_limits_s(asyncio.run(launch()))
        assert {name: s for name, s in limits.items() if s < PATIENCE_S} == {}

    def test_a_sandbox_that_dies_in_mid_call(self, ordinary: Mapping[str, Played]) -> None:
        running, opened = descendants(), descriptors()  # whatever is opened once for all has been, by now
        killed: set[int] = set()

        async def kill(stage: Stage, asked: EngineRequest, turn: int) -> None:
            if turn == 1:
                killed.update(descendants() - running)
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(self.limit_s)

        began = time.monotonic()
        played = self.play(Play("dying", self.harness(), self.steps("true", "true")), before=kill)["dying"]
        assert time.monotonic() - began < self.limit_s, "the pending call was not given up"
        assert played.rollout.status is Status.SANDBOX_ERROR, played
        assert played.rollout.reward is None and played.rollout.ledger.trained == 0, played
        assert len(played.rollout.records) == 1, played
        assert killed and wait_until(lambda: not killed & set(processes())), killed & set(processes())
        assert wait_until(lambda: descendants() <= running)
        assert descriptors() <= opened

    def test_a_refused_request_ends_the_run(self) -> None:
        settings = replace(self.settings(), budget=Budget(max_calls=3))
        plays = Play("spender", self.harness(), self.steps(*["echo again >> again.txt"] * 9))
        played = self.play(plays, settings=settings)["spender"]
        assert played.rollout.status is Status.BUDGET_EXHAUSTED, played
        assert played.rollout.reward is not None, played
        assert len(played.rollout.records) == 3, played
        assert played.workspace["again.txt"] == b"again\n" * 3, played
        self.check_account(played)


def _difference(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"first prompts differ at character {at}: {one[at - 40 : at + 80]!r} and {other[at - 40 : at + 80]!r}"
