"""Hermes, the agent of Nous Research, as a user who runs ``hermes chat -Q`` has it, and with a short prompt.

Invariant: the first prompt of a task is the same in every rollout: the program is mounted at a fixed path, HOME and
Hermes's state in it are fresh, and all that Hermes fetches, reports or does beside its task is off.

It refuses a model whose window is under 64,000 tokens: a smaller one is declared as that large, and Hermes shortens its
conversation when the endpoint says that it is full.
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
from clawgym_env.harnesses.merging import merged
from clawgym_env.harnesses.packages import HERMES
from clawgym_env.harnesses.pypi import interpreter_mounts
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "hermes"
TARGET = "/opt/clawgym/hermes"
DRIVER = Path(__file__).with_name("drivers") / "hermes_driver.py"
DRIVER_TARGET = "/opt/clawgym/hermes-driver.py"
DAY_S = 24 * 3600
LEAST_CONTEXT = 64_000
LEAN_TOOLSETS = "terminal"
PROMPT = ".hermes/system-prompt.md"
LEAN_PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done."
SHELL = Shell("terminal")
DIALECT = Dialect(tolerates=SAFE | {Tolerance.REWRITTEN_ARGUMENTS})


class HermesHarness(BaseModel):
    """Runs ``hermes chat`` against the rollout's endpoint, over OpenAI chat completions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: the tools for commands, and a system prompt of one line. ``stock``: what Hermes's users have."""

    config: Mapping[str, Any] = Field(default_factory=dict)
    """Further configuration as in its ``config.yaml``, on top: ``{"terminal": {"timeout": 60}}``."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of ``hermes chat``."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo(
            NAME, "Hermes Agent", HERMES.version, "MIT", ("openai_chat",), HERMES.install_mb, DIALECT, SHELL
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
        lean = self.profile == "lean"
        arguments = [f"{sandbox.home}/{PROMPT}" if lean else "", "--yolo"]
        arguments += ["--toolsets", LEAN_TOOLSETS] if lean else []
        files = {"~/.hermes/config.yaml": json.dumps(self._config(context, sandbox), indent=1)}
        if lean:
            files[f"~/{PROMPT}"] = LEAN_PROMPT.format(workspace=sandbox.workspace)
        return Launch(
            argv=[*HERMES.command(folder, driver), *arguments, *self.extra_args],
            env={
                **({"HERMES_SAFE_MODE": "1"} if lean else {}),  # no plugins, whose loading takes a CPU-second
                "HERMES_HOME": f"{sandbox.home}/.hermes",
                "HERMES_YOLO_MODE": "1",
                "HERMES_API_TIMEOUT": str(DAY_S),
                "HERMES_STREAM_READ_TIMEOUT": str(DAY_S),
                "HERMES_STREAM_STALE_TIMEOUT": str(DAY_S),
                "HERMES_STREAM_RETRIES": "0",
            },
            files={path: text.encode() for path, text in files.items()},
            stdin=context.instruction.encode(),
        )

    def _config(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, Any]:
        """``config.yaml``: the one model there is, and nothing that is asked of anyone but its endpoint."""
        config: dict[str, Any] = {
            "model": {
                "default": context.model,
                "provider": "custom",
                "base_url": f"{context.base_url}/v1",
                "api_key": context.api_key,
                "context_length": max(context.max_context, LEAST_CONTEXT),
                "max_tokens": context.max_tokens,
            },
            "terminal": {"backend": "local", "cwd": sandbox.workspace},
            "agent": {"api_max_retries": 1},
            "auxiliary": {
                "title_generation": {"enabled": False},
                "compression": {"timeout": DAY_S, "context_length": max(context.max_context, LEAST_CONTEXT)},
            },
            "curator": {"enabled": False},
            "security": {"tirith_enabled": False},  # a program that it would fetch
        }
        if context.max_context < LEAST_CONTEXT:
            config["compression"] = {"protect_last_n": 4}
        if self.profile == "lean":
            config["agent"] |= {"environment_probe": False, "coding_context": "off", "verify_on_stop": False}
            config["memory"] = {"memory_enabled": False, "user_profile_enabled": False}
        return merged(config, self.config)

    def exit_error(self, result: ExecResult) -> str | None:
        """Why Hermes failed, in one line; ``None`` when it ended as it should."""
        if result.rc == 0:
            return None
        if result.rc < 0:
            return f"Hermes was killed by signal {-result.rc}"
        lines = f"{result.stdout.decode(errors='replace')}\n{result.stderr.decode(errors='replace')}".splitlines()
        told = [line for line in lines if line.strip() and not line.startswith("session_id:")]
        return told[-1][:500] if told else f"Hermes ended with exit code {result.rc} and said nothing"
