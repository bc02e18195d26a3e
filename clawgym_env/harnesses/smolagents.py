"""smolagents, Hugging Face's library of small agents: one that calls tools, or one that writes Python.

Invariant: the first prompt of a task is the same in every rollout: packages and script are mounted at fixed paths, and
HOME is fresh.

It tells the policy's tool calls again as text of its own. No answer is an echo of one before, so that every call is
rendered from scratch and is an end of its own in the tree: it is trained call by call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.harnesses.endings import last_words
from clawgym_env.harnesses.packages import SMOLAGENTS
from clawgym_env.harnesses.pypi import interpreter_mounts
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox
from clawgym_env.types import ToolCall

NAME = "smolagents"
TARGET = "/opt/clawgym/smolagents"
SCRIPT = Path(__file__).with_name("drivers") / "smolagents_driver.py"
SCRIPT_TARGET = "/opt/clawgym/smolagents-script.py"
SHELL = Shell(end=ToolCall("final_answer", {"answer": "Done."}))
LEAN_PROMPTS: Mapping[str, str] = {
    "tool_calling": "Work on the user's task with the tools, in {workspace}, until it is done. Then call final_answer.",
    "code": (
        "Work on the user's task in {workspace}, until it is done, with Python between <code> and </code>. "
        "bash(command) runs a shell command and returns its output, print shows you what you need to see, and "
        "final_answer(answer) ends your work."
    ),
}


class SmolagentsHarness(BaseModel):
    """Runs an agent of smolagents against the rollout's endpoint, over OpenAI chat completions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: Literal["tool_calling", "code"] = "tool_calling"
    """``tool_calling``: tools as the API has them. ``code``: Python in the text of answers, which calls functions."""

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: a system prompt of a line or two. ``stock``: the library's own."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo(
            NAME,
            "smolagents",
            SMOLAGENTS.version,
            "Apache-2.0",
            ("openai_chat",),
            SMOLAGENTS.install_mb,
            shell=SHELL if self.agent == "tool_calling" else None,
        )

    def mounts(self) -> Sequence[Mount]:
        """The library's packages, the script with the agent, and the Python that runs them.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        return (Mount(install.require(NAME), TARGET), Mount(SCRIPT, SCRIPT_TARGET), *interpreter_mounts())

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line and environment of one rollout; the task comes on stdin."""
        folder, script, *_ = (sandbox.inside(mount) for mount in self.mounts())
        prompt = LEAN_PROMPTS[self.agent].format(workspace=sandbox.workspace) if self.profile == "lean" else ""
        settings = {
            "agent": self.agent,
            "model": context.model,
            "max_tokens": context.max_tokens,
            "system_prompt": prompt,
        }
        return Launch(
            argv=[*SMOLAGENTS.command(folder, script), json.dumps(settings)],
            env={
                "OPENAI_BASE_URL": f"{context.base_url}/v1",
                "OPENAI_API_KEY": context.api_key,
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            },
            stdin=context.instruction.encode(),
        )

    def exit_error(self, result: ExecResult) -> str | None:
        """Why the agent failed, in one line; ``None`` when it ended as it should."""
        return last_words(result, "the agent")
