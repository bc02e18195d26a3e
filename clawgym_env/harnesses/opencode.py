"""OpenCode, a coding agent of the terminal, as a user who runs ``opencode run`` has it, and with a short prompt.

Invariant: the first prompt of a task is the same in every rollout: the program is mounted at a fixed path, HOME is
fresh, and all that OpenCode fetches, reports or remembers is off. The day, which it always writes, is taken out of the
lean profile's requests (``STEADY``).

It is a native program and needs no Node. The instruction goes in on stdin: as an argument it would be bounded by the
kernel. Events on stdout, one a line, say how the run ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.dialect import SAFE, Dialect, Rewrite, Tolerance
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell, Wire
from clawgym_env.harnesses.endings import after_events
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "opencode"
TARGET = "/opt/clawgym/opencode"
CONFIG = "~/.config/opencode/opencode.json"
PROVIDER = "local"
AGENT = "lean"
KEY_VARIABLE = "OPENCODE_LOCAL_KEY"
DAY_MS = 24 * 3600 * 1000
LEAN_PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done."
LEAN_TOOLS = ("bash", "read", "edit", "external_directory", "doom_loop")
"""Permissions, not tools: ``edit`` is that of every tool which writes files; the last two are no tools at all."""
#: Wire -> the client of it that the program holds.
CLIENTS: Mapping[Wire, str] = {
    "openai_chat": "@ai-sdk/openai-compatible",
    "openai_responses": "@ai-sdk/openai",
    "anthropic_messages": "@ai-sdk/anthropic",
}
#: What every first prompt says of the day.
STEADY = (Rewrite("date", re.compile(r"\n *Today's date: [^\n]*")),)
SHELL = Shell(others={"description": "Runs a command"})
#: OpenCode's own defaults, which are larger than the whole window of a small policy.
COMPACTION_RESERVE = 20_000
QUIET = (
    *(
        f"OPENCODE_DISABLE_{what}"
        for what in (
            "AUTOUPDATE",
            "CLAUDE_CODE",
            "DEFAULT_PLUGINS",
            "EMBEDDED_WEB_UI",
            "EXTERNAL_SKILLS",
            "FFF",
            "LSP_DOWNLOAD",
            "MODELS_FETCH",
            "PROJECT_CONFIG",
            "SHARE",
        )
    ),
    "OPENCODE_EXPERIMENTAL_DISABLE_FILEWATCHER",
    "OPENCODE_PURE",
)


class OpenCodeHarness(BaseModel):
    """Runs ``opencode run`` against the rollout's endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wire: Literal["openai_chat", "openai_responses", "anthropic_messages"] = "openai_chat"
    """API that OpenCode speaks."""

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: a shell and tools for files under a prompt of one line. ``stock``: what OpenCode's users have."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of its command line."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        package = install.PACKAGES[NAME]
        dialect = Dialect(
            tolerates=SAFE | {Tolerance.REWRITTEN_ARGUMENTS, Tolerance.RENAMED_CALLS},
            stabilise=STEADY if self.profile == "lean" else (),
            agent_header="x-session-id",
            parent_header="x-parent-session-id",
        )
        return HarnessInfo(NAME, "OpenCode", package.version, "MIT", tuple(CLIENTS), package.install_mb, dialect, SHELL)

    def mounts(self) -> Sequence[Mount]:
        """The folder of the program.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        program = Path(install.PACKAGES[NAME].program(str(install.require(NAME))))
        return (Mount(program.parent, TARGET),)

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        (folder,) = (sandbox.inside(mount) for mount in self.mounts())
        return Launch(
            argv=[f"{folder}/opencode", *self._arguments()],
            env={
                **dict.fromkeys(QUIET, "1"),
                KEY_VARIABLE: context.api_key,
                "OPENCODE_DB": ":memory:",
                "OPENCODE_EXPERIMENTAL_OUTPUT_TOKEN_MAX": str(context.max_tokens),
            },
            files={CONFIG: json.dumps(self._config(context, sandbox), indent=1).encode()},
            stdin=context.instruction.encode(),
        )

    def _arguments(self) -> list[str]:
        agent = ["--agent", AGENT] if self.profile == "lean" else []
        return ["run", "--title", "task", "--format", "json", *agent, *self.extra_args]

    def _config(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, Any]:
        """``opencode.json``: the one model there is, wait as long as it takes, and tell nobody else."""
        base = context.base_url + "/v1"
        model = {
            "name": context.model,
            "tool_call": True,
            "limit": {"context": context.max_context, "output": context.max_tokens},
        }
        provider = {
            "npm": CLIENTS[self.wire],
            "name": PROVIDER,
            "options": {
                "baseURL": base,
                "apiKey": f"{{env:{KEY_VARIABLE}}}",
                "timeout": False,
                "headerTimeout": False,
                "chunkTimeout": DAY_MS,
            },
            "models": {context.model: model},
        }
        config: dict[str, Any] = {
            "model": f"{PROVIDER}/{context.model}",
            "small_model": f"{PROVIDER}/{context.model}",
            "enabled_providers": [PROVIDER],
            "provider": {PROVIDER: provider},
            "permission": {"*": "allow"},
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "lsp": False,
            "formatter": False,
            "compaction": {"reserved": min(COMPACTION_RESERVE, context.max_tokens)},
        }
        if self.profile == "lean":
            config["agent"] = {
                AGENT: {
                    "mode": "primary",
                    "prompt": LEAN_PROMPT.format(workspace=sandbox.workspace),
                    "permission": {"*": "deny", **dict.fromkeys(LEAN_TOOLS, "allow")},
                }
            }
        return config

    def exit_error(self, result: ExecResult) -> str | None:
        """Why OpenCode failed, in one line; ``None`` when it ended as it should."""
        return after_events(result, "OpenCode", "step", *_ending(result.stdout))


def _ending(stdout: bytes) -> tuple[bool, str | None]:
    """Whether the events tell of a step that was finished, and the failure that came after the last of these."""
    ended, why = False, None
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("type") == "step_finish":
            ended, why = True, None
        elif event.get("type") == "error":
            why = _message(event.get("error"))
    return ended, why


def _message(error: Any) -> str:
    """The words of an error as OpenCode tells it: a name and, within data, a message."""
    data = error.get("data") if isinstance(error, Mapping) else None
    said = data.get("message") if isinstance(data, Mapping) else None
    if said:
        return str(said)
    return str(error.get("name", error)) if isinstance(error, Mapping) else str(error)
