"""pi, a coding agent with four tools and a short prompt: our cheapest real harness, over each of the four wires.

Invariant: the first prompt of a task is the same in every rollout and on every machine: pi and Node are mounted at
fixed paths (pi's system prompt names its own folder), and nothing of the user's own configuration is inside.

The instruction goes in on stdin: as an argument it would be bounded by the kernel, and a leading ``@`` would name a
file. Text mode is used because only it ends with a non-zero exit code when the last request failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.dialect import SAFE, Dialect, Tolerance
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Wire
from clawgym_env.harnesses.endings import last_words
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

PI_TARGET = "/opt/clawgym/pi"
NODE_TARGET = "/opt/clawgym/node/bin/node"
PROVIDER = "local"
KEY_VARIABLE = "LOCAL_KEY"
DAY_MS = 24 * 3600 * 1000
# pi's own defaults, which are larger than the whole window of a small policy
COMPACTION_RESERVE = 16384
COMPACTION_KEEP = 20000
# pi asks for at most window - prompt - this many tokens: declared on top, so that a small window leaves room to answer
CONTEXT_SAFETY = 4096


@dataclass(frozen=True, slots=True)
class _Api:
    """What pi calls a wire, what its base URL ends in, and where our endpoint is not as pi takes for granted."""

    name: str
    path: str
    compat: Mapping[str, bool]


APIS: Mapping[Wire, _Api] = {
    "openai_chat": _Api("openai-completions", "/v1", {"supportsStore": False, "supportsDeveloperRole": False}),
    "openai_responses": _Api("openai-responses", "/v1", {"supportsDeveloperRole": False}),
    "anthropic_messages": _Api("anthropic-messages", "", {}),
    "gemini": _Api("google-generative-ai", "/v1beta", {}),
}
# Over the two OpenAI APIs, arguments that are no JSON come back as ``{}``, with the call's id and a result that quotes
# them; everything else comes back as it was.
DIALECT = Dialect(tolerates=SAFE | {Tolerance.REWRITTEN_ARGUMENTS})


class PiHarness(BaseModel):
    """Runs ``pi --print`` against the rollout's endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wire: Wire = "openai_chat"
    """API that pi speaks."""

    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"] = "off"
    """Effort that pi asks the model for; anything but ``off`` declares the model a reasoning model."""

    tools: tuple[str, ...] = ("read", "bash", "edit", "write")
    """Tools that the model is offered."""

    compaction: bool = True
    """Whether pi may summarise a conversation that outgrows the window."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of pi's command line."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        package = install.PACKAGES["pi"]
        return HarnessInfo("pi", "pi coding agent", package.version, "MIT", tuple(APIS), package.install_mb, DIALECT)

    def mounts(self) -> Sequence[Mount]:
        """pi's folder, compile cache included, and Node.

        Raises:
            HarnessNotInstalled: with the command that installs it.
            HarnessError: there is no suitable Node.
        """
        return (Mount(install.require("pi"), PI_TARGET), Mount(install.find_node().executable, NODE_TARGET))

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        pi, node = (sandbox.inside(mount) for mount in self.mounts())
        return Launch(
            argv=[node, install.PACKAGES["pi"].program(pi), *self._arguments(context)],
            env={
                KEY_VARIABLE: context.api_key,
                "PI_OFFLINE": "1",
                "PI_TELEMETRY": "0",
                "PI_SKIP_VERSION_CHECK": "1",
                "NODE_COMPILE_CACHE": f"{pi}/{install.COMPILE_CACHE}",
                "NODE_COMPILE_CACHE_PORTABLE": "1",
            },
            files={
                "~/.pi/agent/models.json": _json(self._models(context)),
                "~/.pi/agent/settings.json": _json(self._settings(context)),
            },
            stdin=context.instruction.encode(),
        )

    def _arguments(self, context: LaunchContext) -> list[str]:
        arguments = ["--print", "--mode", "text", "--offline", "--no-session", "--tools", ",".join(self.tools)]
        return [
            *arguments,
            "--provider",
            PROVIDER,
            "--model",
            context.model,
            "--thinking",
            self.thinking,
            *self.extra_args,
        ]

    def _models(self, context: LaunchContext) -> dict[str, object]:
        """``models.json``: the one model there is."""
        api = APIS[self.wire]
        model = {
            "id": context.model,
            "name": context.model,
            "reasoning": self.thinking != "off",
            "input": ["text"],
            "contextWindow": context.max_context + CONTEXT_SAFETY,
            "maxTokens": context.max_tokens,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": context.base_url + api.path,
            "api": api.name,
            "apiKey": f"${KEY_VARIABLE}",
            "compat": dict(api.compat),
            "models": [model],
        }
        return {"providers": {PROVIDER: provider}}

    def _settings(self, context: LaunchContext) -> dict[str, object]:
        """``settings.json``: wait as long as it takes, and never ask twice."""
        return {
            "retry": {"enabled": False, "provider": {"maxRetries": 0, "timeoutMs": DAY_MS}},
            "httpIdleTimeoutMs": "disabled",
            "compaction": {
                "enabled": self.compaction,
                "reserveTokens": min(COMPACTION_RESERVE, context.max_tokens) + CONTEXT_SAFETY,
                "keepRecentTokens": min(COMPACTION_KEEP, context.max_context // 4),
            },
            "cacheWarming": "off",
            "enableInstallTelemetry": False,
        }

    def exit_error(self, result: ExecResult) -> str | None:
        """Why pi failed, in one line; ``None`` when it ended as it should."""
        return last_words(result, "pi")


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
