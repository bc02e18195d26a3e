"""nanobot, a small personal assistant with memory, skills and background sub-agents, given a task in a folder.

Invariant: the first prompt of a task is the same in every rollout: the program is mounted at a fixed path, HOME and
nanobot's own workspace in it are fresh, and all that nanobot fetches or does on a schedule is off. The task's workspace
is its project folder, as in its WebUI: profile, memory, sessions and schedules lie below HOME.

It is asked over its message bus (``drivers/nanobot_driver.py``), by which it waits for its sub-agents and tells of
failures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from clawgym_env.dialect import SAFE, Dialect, Tolerance
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.harnesses.endings import last_words
from clawgym_env.harnesses.merging import merged
from clawgym_env.harnesses.packages import NANOBOT
from clawgym_env.harnesses.pypi import interpreter_mounts
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "nanobot"
TARGET = "/opt/clawgym/nanobot"
DRIVER = Path(__file__).with_name("drivers") / "nanobot_driver.py"
DRIVER_TARGET = "/opt/clawgym/nanobot-driver.py"
CONFIG = ".nanobot/config.json"
SETTINGS = ".nanobot/rollout.json"
PROVIDER = "custom"
IDLE_S = 3600  # the longest that nanobot takes
LEAN_TOOLS = ("exec", "read_file", "edit_file", "write_file")
LEAN_PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done."
SHELL = Shell("exec")
# Arguments that are no object come back as ``{}`` or repaired, with the call's id and a result that says so.
DIALECT = Dialect(tolerates=SAFE | {Tolerance.REWRITTEN_ARGUMENTS})


class NanobotHarness(BaseModel):
    """Runs nanobot against the rollout's endpoint, over OpenAI chat completions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: four tools and a system prompt of one line. ``stock``: what nanobot's users have."""

    tools: tuple[str, ...] | None = None
    """Tools that the model is offered, in place of the profile's."""

    config: Mapping[str, Any] = Field(default_factory=dict)
    """Further configuration as in its ``config.json``, on top: ``{"tools": {"exec": {"timeout": 120}}}``."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo(
            NAME, "nanobot", NANOBOT.version, "MIT", ("openai_chat",), NANOBOT.install_mb, DIALECT, SHELL
        )

    def mounts(self) -> Sequence[Mount]:
        """Its packages, the driver, and the Python that runs them.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        return (Mount(install.require(NAME), TARGET), Mount(DRIVER, DRIVER_TARGET), *interpreter_mounts())

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        folder, driver, *_ = (sandbox.inside(mount) for mount in self.mounts())
        return Launch(
            argv=[*NANOBOT.command(folder, driver), f"{sandbox.home}/{SETTINGS}"],
            env={
                "NANOBOT_STREAM_IDLE_TIMEOUT_S": str(IDLE_S),
                "NANOBOT_OPENAI_COMPAT_TIMEOUT_S": str(IDLE_S),
            },
            files={
                f"~/{CONFIG}": json.dumps(self._config(context), indent=1).encode(),
                f"~/{SETTINGS}": json.dumps(self._settings(sandbox), indent=1).encode(),
            },
            stdin=context.instruction.encode(),
        )

    def _settings(self, sandbox: Sandbox) -> dict[str, object]:
        """What the driver is told."""
        lean = self.profile == "lean"
        return {
            "config": f"{sandbox.home}/{CONFIG}",
            "project": sandbox.workspace,
            "prompt": LEAN_PROMPT.format(workspace=sandbox.workspace) if lean else None,
            "tools": LEAN_TOOLS if lean and self.tools is None else self.tools,
        }

    def _config(self, context: LaunchContext) -> dict[str, Any]:
        """``config.json``: the one model there is, and nothing that is asked of anyone but its endpoint."""
        config: dict[str, Any] = {
            "agents": {
                "defaults": {
                    "model": context.model,
                    "provider": PROVIDER,
                    "maxTokens": context.max_tokens,
                    "contextWindowTokens": context.max_context,
                    "idleCompactAfterMinutes": 0,
                    "timezone": "UTC",
                    "dream": {"enabled": False},
                }
            },
            "providers": {PROVIDER: {"apiKey": context.api_key, "apiBase": f"{context.base_url}/v1"}},
            "tools": {"web": {"enable": False}},
        }
        return merged(config, self.config)

    def exit_error(self, result: ExecResult) -> str | None:
        """Why nanobot failed, in one line; ``None`` when it ended as it should."""
        return last_words(result, "nanobot")
