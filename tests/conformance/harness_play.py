"""Real rollouts for the harness suite: scripted answers in, records and workspaces out.

Invariant: nothing here waits longer than it was told to. A harness that hangs ends as :class:`Hung`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.harnesses.base import Harness
from clawgym_env.pool import RolloutPool, open_runner
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes import Backend, Capabilities, Sandbox, SandboxSpec
from clawgym_env.tasks.base import FreshSandbox, Snapshot, Task
from clawgym_env.types import Generation, Message, Reward, Status, TokenArray, ToolCall

#: The policy may think; it need not.
RENDERER = ChatRenderer.from_folder(enable_thinking=True)
#: (request, how many calls this rollout has made before) -> answer.
Script = Callable[[EngineRequest, int], TokenArray]
#: Awaited before each answer.
Before = Callable[["Stage", EngineRequest, int], Awaitable[None]]


class Hung(AssertionError):
    """The harness did not end by itself in time."""


def say(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> TokenArray:
    """Ids of an answer."""
    return RENDERER.encode_reply(text, *calls, reasoning=reasoning)


def raw(text: str) -> TokenArray:
    """Ids of an answer that is written out, markup and all."""
    return np.array([*RENDERER.tokenizer.encode(text), RENDERER.stop_token_ids[0]], dtype=np.int64)


def in_turn(answers: Sequence[TokenArray]) -> Script:
    """Says these, and the last one for ever."""
    return lambda request, turn: answers[min(turn, len(answers) - 1)]


async def _nothing(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    return Reward(1.0, True)


#: Any workspace will do.
FREE_TASK = Task("free/1", "conformance", "free", "Do what has to be done.", {"given.txt": b"given\n"}, _nothing)


@dataclass(frozen=True, eq=False)
class Play:
    """One rollout to be run.

    Attributes:
        answers: What the policy says in turn, the last one for ever; or a script.
    """

    name: str
    harness: Harness
    answers: Sequence[TokenArray] | Script
    task: Task = FREE_TASK


@dataclass(eq=False)
class Played:
    """One rollout that was run.

    Attributes:
        requests: What the policy was asked, in order.
        workspace: What the verifier saw; empty where there was no verifier's turn.
    """

    rollout: Rollout
    requests: list[EngineRequest]
    workspace: dict[str, bytes]

    @property
    def told(self) -> list[Message]:
        """Every message that the harness told the policy, each once."""
        return [m for record in self.rollout.records for m in record.messages]

    @property
    def results(self) -> list[str]:
        """Results of tools, in order."""
        return [m.content for m in self.told if m.role == "tool"]

    def __str__(self) -> str:
        rollout = self.rollout
        calls = [f"{r.call.kind} {r.parent}: {r.reply.content[:60]!r} {r.reply.tool_calls}" for r in rollout.records]
        lines = [f"{rollout.id}: {rollout.status} {rollout.detail}", str(rollout.ledger.as_dict()), *calls]
        return "\n  ".join([*lines, f"tool results: {[r[-200:] for r in self.results]}"])


@dataclass(eq=False)
class Stage:
    """What is going on while rollouts run.

    Attributes:
        cancelled: Names of rollouts whose calls were given up while they were pending.
    """

    boxes: list[Sandbox] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


class _Policy:
    """Says what the plays' scripts say."""

    def __init__(self, plays: Iterable[Play], max_context: int, stage: Stage, before: Before | None) -> None:
        scripts = {p.name: p.answers if callable(p.answers) else in_turn(p.answers) for p in plays}
        self.asked: dict[str, list[EngineRequest]] = {name: [] for name in scripts}
        self._engine = ScriptedEngine(lambda r, turn: scripts[r.rollout_id](r, turn), max_context=max_context)
        self._stage, self._before = stage, before
        self.max_context, self.policy_version = max_context, 0

    async def generate(self, request: EngineRequest) -> Generation:
        asked = self.asked[request.rollout_id]
        asked.append(request)
        try:
            if self._before is not None:
                await self._before(self._stage, request, len(asked) - 1)
        except asyncio.CancelledError:
            self._stage.cancelled.append(request.rollout_id)
            raise
        return await self._engine.generate(request)

    async def aclose(self) -> None:
        """Nothing to free."""


class _Watched:
    """A backend whose sandboxes are remembered."""

    def __init__(self, inner: Backend, stage: Stage) -> None:
        self._inner, self._stage, self.name = inner, stage, inner.name

    def probe(self) -> Capabilities:
        return self._inner.probe()

    def reap(self) -> int:
        return self._inner.reap()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        box = await self._inner.create(spec)
        self._stage.boxes.append(box)
        return box


async def play(
    plays: Sequence[Play],
    backend: Backend,
    settings: RolloutSettings,
    *,
    max_context: int = 131_072,
    concurrency: int = 3,
    before: Before | None = None,
) -> dict[str, Played]:
    """Runs rollouts, several at once.

    Raises:
        Hung: one ran into its time limit; the others are given up.
    """
    stage = Stage()
    policy = _Policy(plays, max_context, stage, before)
    kept: dict[str, dict[str, bytes]] = {p.name: {} for p in plays}
    specs = [RolloutSpec(p.name, _keeping(p.task, kept[p.name]), p.harness, p.task.id) for p in plays]
    done: dict[str, Played] = {}
    async with (
        open_runner(policy, RENDERER, _Watched(backend, stage), settings) as runner,
        aclosing(RolloutPool(runner, concurrency=concurrency).as_completed(specs)) as rollouts,
    ):
        async for rollout in rollouts:
            played = Played(rollout, policy.asked[rollout.id], kept[rollout.id])
            if rollout.seconds.get("harness", 0.0) >= settings.timeout_s:
                raise Hung(f"the harness was still running after {settings.timeout_s:g} s: {played}")
            done[rollout.id] = played
    for name in stage.cancelled:
        assert done[name].rollout.status is not Status.COMPLETED, f"a call was given up: {done[name]}"
    return done


def _keeping(task: Task, into: dict[str, bytes]) -> Task:
    async def verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
        into.update(snapshot)
        return await task.verify(snapshot, fresh)

    return replace(task, verify=verify)


def processes() -> dict[int, tuple[int, str]]:
    """Every process that can be seen: pid -> parent and command line; dead ones that nobody has waited for included."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found[int(entry.name)] = parent, command
    return found


def descendants() -> set[int]:
    """Processes below this one."""
    seen, found = processes(), {os.getpid()}
    while more := {pid for pid, (parent, _) in seen.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    """Polls until a condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
