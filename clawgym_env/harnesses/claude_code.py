"""Claude Code, Anthropic's agent, as a user who runs ``claude -p`` has it, and with a prompt that fits a small window.

Invariant: the first prompt of a task is the same in every rollout: the program is mounted at a fixed path, HOME and its
state are fresh, the session's id is fixed, and all that Claude Code fetches, reports or remembers is off.

It is proprietary: only ``clawgym harness install claude-code`` installs it. It is a native program and needs no Node.
The instruction goes in on stdin: as an argument it would be bounded by the kernel, and a leading ``-`` would be an
option. The result is one JSON object on stdout; it tells a failure even where the exit code is 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from clawgym_env.dialect import SAFE, Dialect, Rewrite
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "claude-code"
PROGRAM_TARGET = "/opt/clawgym/claude-code/claude"
SESSION_ID = "00000000-0000-4000-8000-000000000000"
DAY_MS = 24 * 3600 * 1000
LEAN_TOOLS = ("Bash", "Read", "Edit")  # all that there is in its bare mode
LEAN_PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done."

#: Nothing but the endpoint is asked for anything, nothing is kept, and requests do not change from call to call.
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_UPDATES": "1",
    "DISABLE_COST_WARNINGS": "1",
    "DISABLE_PROMPT_CACHING": "1",  # whose marks move from call to call
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
    "API_TIMEOUT_MS": str(DAY_MS),
    "IS_SANDBOX": "1",  # else it refuses to skip permissions as root, which a process sandbox may be
}
DIALECT = Dialect(
    tolerates=SAFE,
    stabilise=(Rewrite("billing header", re.compile(r"x-anthropic-billing-header:[^\n]*\n?")),),
    agent_header="x-claude-code-agent-id",
    parent_header="x-claude-code-parent-agent-id",
    kind_header="x-claude-code-request-class",
    kinds={"main": "main", "subagent": "subagent", "compaction": "compaction"},
)


class ClaudeCodeHarness(BaseModel):
    """Runs ``claude --print`` against the rollout's endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: three tools and a system prompt of one line. ``stock``: what Claude Code's users have."""

    system_prompt: str | None = None
    """Takes the place of the profile's system prompt."""

    tools: tuple[str, ...] | None = None
    """Tools that the model is offered, in place of the profile's."""

    thinking: bool = False
    """Whether Claude Code asks for thinking."""

    max_turns: int | None = Field(None, ge=1)
    """Most calls of the main agent."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of its command line."""

    @model_validator(mode="after")
    def _lean_tools(self) -> ClaudeCodeHarness:
        missing = set(self.tools or ()) - set(LEAN_TOOLS)
        if self.profile == "lean" and missing:
            raise ValueError(f"the lean profile has no {', '.join(sorted(missing))}; name tools with profile='stock'")
        return self

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        package = install.PACKAGES[NAME]
        return HarnessInfo(
            NAME, "Claude Code", package.version, "proprietary", ("anthropic_messages",), package.install_mb, DIALECT,
            Shell("Bash"),
        )  # fmt: skip

    def mounts(self) -> Sequence[Mount]:
        """The program, which is one file.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        folder = install.require(NAME)
        return (Mount(Path(install.PACKAGES[NAME].program(str(folder))), PROGRAM_TARGET),)

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        (program,) = (sandbox.inside(mount) for mount in self.mounts())
        return Launch(
            argv=[program, *self._arguments(sandbox)],
            env=self._environment(context, sandbox),
            stdin=context.instruction.encode(),
        )

    def _arguments(self, sandbox: Sandbox) -> list[str]:
        arguments = ["--print", "--output-format", "json", "--session-id", SESSION_ID, "--dangerously-skip-permissions"]
        prompt, tools = self.system_prompt, self.tools
        if self.profile == "lean":
            arguments.append("--bare")  # short descriptions of tools, and no reminders
            prompt = LEAN_PROMPT.format(workspace=sandbox.workspace) if prompt is None else prompt
            tools = LEAN_TOOLS if tools is None else tools
        if prompt is not None:
            arguments += ["--system-prompt", prompt]
        if tools is not None:
            arguments += ["--tools", ",".join(tools)]
        if self.max_turns is not None:
            arguments += ["--max-turns", str(self.max_turns)]
        return [*arguments, *self.extra_args]

    def _environment(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, str]:
        env = {
            **QUIET,
            "CLAUDE_CONFIG_DIR": f"{sandbox.home}/.claude",
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_AUTH_TOKEN": context.api_key,
            "ANTHROPIC_MODEL": context.model,
            "ANTHROPIC_SMALL_FAST_MODEL": context.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": context.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": context.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": context.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.max_context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
        }
        if not self.thinking:
            env["MAX_THINKING_TOKENS"] = "0"
        return env

    def exit_error(self, result: ExecResult) -> str | None:
        """Why Claude Code failed, in one line; ``None`` when it ended as it should."""
        if result.rc < 0:
            return f"Claude Code was killed by signal {-result.rc}"
        said = _result(result.stdout)
        if said is None and result.truncated and result.rc == 0:
            return None  # more was written to its stdout than is kept, by itself or by a command that it ran
        if said is None:
            lines = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
            return lines[-1][:500] if lines else f"Claude Code ended with exit code {result.rc} and no result"
        if result.rc == 0 and not said.get("is_error") and said.get("subtype") == "success":
            return None
        text = " ".join(str(said.get("result") or said.get("errors") or "").split())
        return f"{said.get('subtype', 'error')}: {text}"[:500] if text else str(said.get("subtype", "error"))


def _result(stdout: bytes) -> dict[str, Any] | None:
    """The result object, which is the last line of stdout that is one."""
    for line in reversed(stdout.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("type") == "result":
            return value
    return None
