"""The smallest harness: our own deterministic agent, for tests and for measuring what a real one adds.

Invariant: nothing to install; same instruction and same answers give the same requests, byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from clawgym_env.harnesses import scripted_agent
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox
from clawgym_env.sandboxes.bubblewrap import SYSTEM_PYTHON

AGENT_TARGET = "/opt/clawgym/scripted/agent.py"


class ScriptedHarness(BaseModel):
    """Runs ``scripted_agent.py`` with the system's Python, or with ours where there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo("scripted", "scripted agent", "", "Apache-2.0", ("openai_chat",), 0, shell=None)

    def mounts(self) -> Sequence[Mount]:
        """The agent's one file."""
        return (Mount(Path(scripted_agent.__file__), AGENT_TARGET),)

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line of one rollout; the instruction comes on stdin."""
        (agent,) = (sandbox.inside(mount) for mount in self.mounts())
        python = SYSTEM_PYTHON if SYSTEM_PYTHON.exists() else Path(sys.executable).resolve()
        settings = [context.base_url, context.api_key, context.model, str(context.max_tokens)]
        return Launch([str(python), "-I", "-S", agent, *settings], stdin=context.instruction.encode())

    def exit_error(self, result: ExecResult) -> str | None:
        """Why the agent failed, in one line; ``None`` when it ended as it should."""
        if result.rc == 0:
            return None
        if result.rc < 0:
            return f"the scripted agent was killed by signal {-result.rc}"
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else f"the scripted agent ended with exit code {result.rc}"
