"""Agents written with the OpenAI Agents SDK: one of ours with a shell, or a script of the user's.

Invariant: the first prompt of a task is the same in every rollout: packages and scripts are mounted at fixed paths,
HOME is fresh, and no trace is sent to anyone.

It stands for agents that are a library's loop around tools of their own: the SDK is told its endpoint by the variables
that its users set, and a script that is made for OpenAI's API runs as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.harnesses.endings import last_words
from clawgym_env.harnesses.packages import OPENAI_AGENTS
from clawgym_env.harnesses.pypi import interpreter_mounts
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "openai-agents"
TARGET = "/opt/clawgym/openai-agents"
SCRIPT = Path(__file__).with_name("drivers") / "openai_agents_driver.py"
SCRIPT_TARGET = "/opt/clawgym/openai-agents-script.py"
AGENT_FOLDER = "/opt/clawgym/agent"
INSTRUCTIONS = "Work on the user's task with the tools, in {workspace}, until it is done."
APIS = {"openai_responses": "responses", "openai_chat": "chat_completions"}


class OpenAIAgentsHarness(BaseModel):
    """Runs an agent of the OpenAI Agents SDK against the rollout's endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wire: Literal["openai_responses", "openai_chat"] = "openai_responses"
    """API that the SDK speaks where the script does not say."""

    agent: Path | None = None
    """A script of yours, or a folder with a ``__main__.py``; it reads the task from stdin. ``None`` runs ours."""

    instructions: str = INSTRUCTIONS
    """System prompt of our agent; ``{workspace}`` is its folder."""

    delegates: bool = False
    """Whether our agent has a helper to which it can give a part of the work, a sub-agent."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo(
            NAME,
            "OpenAI Agents SDK",
            OPENAI_AGENTS.version,
            "MIT",
            ("openai_responses", "openai_chat"),
            OPENAI_AGENTS.install_mb,
            shell=Shell() if self.agent is None else None,
        )

    def mounts(self) -> Sequence[Mount]:
        """The SDK's packages, the script that configures it, the user's own, and the Python that runs them.

        Raises:
            HarnessNotInstalled: with the command that installs it.
            ConfigError: there is no such script.
        """
        mounts = [Mount(install.require(NAME), TARGET), Mount(SCRIPT, SCRIPT_TARGET)]
        if self.agent is not None:
            agent = self.agent.expanduser().resolve()
            if not agent.is_file() and not (agent / "__main__.py").is_file():
                raise ConfigError(f"harness {NAME!r}: agent: {self.agent} is no script and has no __main__.py")
            mounts.append(Mount(agent, f"{AGENT_FOLDER}/{agent.name}"))
        return (*mounts, *interpreter_mounts())

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line and environment of one rollout; the task comes on stdin."""
        folder, script, *others = (sandbox.inside(mount) for mount in self.mounts())
        settings = {
            "api": APIS[self.wire],
            "script": others[0] if self.agent is not None else "",
            "instructions": self.instructions.replace("{workspace}", sandbox.workspace),
            "max_tokens": context.max_tokens,
            "delegates": self.delegates,
        }
        return Launch(
            argv=[*OPENAI_AGENTS.command(folder, script), json.dumps(settings)],
            env={
                "OPENAI_BASE_URL": f"{context.base_url}/v1",
                "OPENAI_API_KEY": context.api_key,
                "OPENAI_DEFAULT_MODEL": context.model,
                "OPENAI_AGENTS_DISABLE_TRACING": "1",
            },
            stdin=context.instruction.encode(),
        )

    def exit_error(self, result: ExecResult) -> str | None:
        """Why the agent failed, in one line; ``None`` when it ended as it should."""
        return last_words(result, "the agent")
