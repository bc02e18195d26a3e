"""Agents written with the OpenHands SDK: one with a terminal and a file editor, lean or as the SDK's preset makes it.

Invariant: the first prompt of a task is the same in every rollout: packages and script are mounted at fixed paths, HOME
is fresh, and nothing is asked of anyone but the rollout's endpoint.

The SDK needs Python 3.12, which need not be the one that ClawGym runs on. Its terminal is a shell in a pseudo-terminal;
the other kind that it knows needs tmux, and nothing is gained by it here.
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
from clawgym_env.harnesses.packages import OPENHANDS
from clawgym_env.harnesses.pypi import interpreter_mounts
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "openhands"
TARGET = "/opt/clawgym/openhands"
SCRIPT = Path(__file__).with_name("drivers") / "openhands_driver.py"
SCRIPT_TARGET = "/opt/clawgym/openhands-script.py"
INSTRUCTIONS = "Work on the user's task with the tools, in {workspace}, until it is done."
#: LiteLLM's name of a server of one's own; ``openai`` would have it import OpenAI's client, for half a CPU-second.
PROVIDER = "hosted_vllm"
#: A model that the SDK sends its thinking back to, and makes no other difference for that matters here.
THINKER = "kimi-k2-thinking"
TIMEOUT_S = 24 * 3600
SHELL = Shell("terminal")
# Arguments that do not parse are told again as an object that says so, with the call's id.
DIALECT = Dialect(tolerates=SAFE | {Tolerance.REWRITTEN_ARGUMENTS})


class OpenHandsHarness(BaseModel):
    """Runs an agent of the OpenHands SDK against the rollout's endpoint, over OpenAI chat completions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: two tools and a system prompt of one line. ``stock``: the agent of the SDK's preset."""

    delegates: bool = False
    """Whether it has the SDK's tool that starts sub-agents."""

    llm: Mapping[str, Any] = Field(default_factory=dict)
    """Further settings of the SDK's ``LLM``, on top: ``{"max_message_chars": 10000}``."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo(
            NAME, "OpenHands SDK", OPENHANDS.version, "MIT", ("openai_chat",), OPENHANDS.install_mb, DIALECT, SHELL
        )

    def mounts(self) -> Sequence[Mount]:
        """The SDK's packages, the script with the agent, and the Python that runs them.

        Raises:
            HarnessNotInstalled: with the command that installs it, or what to do where no Python suits.
        """
        return (Mount(install.require(NAME), TARGET), Mount(SCRIPT, SCRIPT_TARGET), *interpreter_mounts(OPENHANDS))

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line and environment of one rollout; the task comes on stdin."""
        folder, script, *_ = (sandbox.inside(mount) for mount in self.mounts())
        settings = {
            "workspace": sandbox.workspace,
            "prompt": INSTRUCTIONS.format(workspace=sandbox.workspace) if self.profile == "lean" else "",
            "delegates": self.delegates,
            "llm": self._llm(context),
        }
        return Launch(
            argv=[*OPENHANDS.command(folder, script), json.dumps(settings)],
            env={
                "OPENAI_API_KEY": context.api_key,
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
                "OH_TERMINAL_PROCESS_PRIORITY": "none",
                "LOG_LEVEL": "WARNING",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_TELEMETRY": "False",
            },
            files={"~/.inputrc": b"set enable-bracketed-paste off\n"},
            stdin=context.instruction.encode(),
        )

    def _llm(self, context: LaunchContext) -> dict[str, Any]:
        """Settings of the SDK's ``LLM``."""
        settings: dict[str, Any] = {
            "model": f"{PROVIDER}/{context.model}",
            "base_url": f"{context.base_url}/v1",
            "api_mode": "chat",
            "num_retries": 1,
            "timeout": TIMEOUT_S,
            "max_output_tokens": context.max_tokens,
        }
        if self.profile == "lean":
            settings["model_canonical_name"] = THINKER
        else:  # to count tokens, by another model's tokenizer, costs half a CPU-second
            settings["max_input_tokens"] = max(1, context.max_context - context.max_tokens)
        return settings | dict(self.llm)

    def exit_error(self, result: ExecResult) -> str | None:
        """Why the agent failed, in one line; ``None`` when it ended as it should."""
        return last_words(result, "the agent")
