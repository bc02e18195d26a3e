"""A world small enough to break on purpose: harnesses of a few lines that run as real programs in a real sandbox."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawgym_env.engines.base import Engine, EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext
from clawgym_env.pool import RolloutPool, open_runner
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes import get_backend
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox
from clawgym_env.tasks.base import FreshSandbox, Snapshot, Task, Verifier
from clawgym_env.types import Reward, TokenArray

#: What every program below begins with: ``ask`` makes one model call.
PRELUDE = """
import json, os, signal, sys, time, urllib.request
URL = sys.argv[1]
def ask(text="hello", url=None, raw=None):
    body = raw if raw is not None else json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request((url or URL) + "/v1/chat/completions", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
"""  # noqa: E501


@dataclass(frozen=True)
class Program:
    """A harness that is a few lines of Python."""

    source: str

    @property
    def info(self) -> HarnessInfo:
        return HarnessInfo("program", "a test program", "1", "none", ("openai_chat",), 0)

    def mounts(self) -> Sequence[Mount]:
        return ()

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        program = PRELUDE + textwrap.dedent(self.source)
        return Launch(["/usr/bin/python3", "-I", "-S", "-c", program, context.base_url])

    def exit_error(self, result: ExecResult) -> str | None:
        return None if result.rc == 0 else f"exit code {result.rc}"


async def passes(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    return Reward(1.0, True)


def task(verify: Verifier = passes) -> Task:
    return Task("t/1", "tests", "one", "do it", {"given.txt": b"1"}, verify)


def says(*texts: str, renderer: ChatRenderer) -> ScriptedEngine:
    """A policy that says these texts in turn, the last one for ever."""
    answers = [renderer.encode_reply(t) for t in texts]

    def script(request: EngineRequest, turn: int) -> TokenArray:
        return answers[min(turn, len(answers) - 1)]

    return ScriptedEngine(script)


RENDERER = ChatRenderer.from_folder()


def run(
    source: str,
    *,
    engine: Engine | None = None,
    verify: Verifier = passes,
    settings: RolloutSettings | None = None,
    sandbox: str = "bubblewrap",
    n: int = 1,
    act: Callable[[asyncio.Task[list[Rollout]]], object] | None = None,
) -> list[Rollout]:
    """Runs ``n`` rollouts of a program; ``act`` may interfere with the running batch."""

    async def go() -> list[Rollout]:
        policy = engine or says("fine", renderer=RENDERER)
        async with open_runner(policy, RENDERER, get_backend(sandbox), settings) as runner:
            specs = [RolloutSpec(f"r{k}", task(verify), Program(source), "g") for k in range(n)]
            work = asyncio.create_task(RolloutPool(runner, concurrency=4).run(specs))
            if act is not None:
                act(work)
            return await work

    return asyncio.run(go())


def as_json(rollout: Rollout) -> str:
    return json.dumps([str(rollout.status), rollout.detail])
