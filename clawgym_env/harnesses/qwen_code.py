"""Qwen Code, the terminal agent of the Qwen models, over OpenAI's chat completions.

Invariant: the first prompt of a task is the same in every rollout: Qwen Code and Node are mounted at fixed paths, its
home is a fresh folder that is gone with the run, and the day that it always writes is taken out of the lean profile's
requests (``STEADY``). All that it fetches, reports or remembers is off.

The instruction goes in on stdin: as an argument it would be bounded by the kernel. The last line of JSON on stdout
says how the run ended. The program is started without its launcher, which only starts it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.dialect import SAFE, Dialect, Rewrite, Tolerance
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "qwen-code"
TARGET = "/opt/clawgym/qwen-code"
NODE_TARGET = "/opt/clawgym/node/bin/node"
SETTINGS = "~/.qwen/settings.json"
DAY_MS = 24 * 3600 * 1000
PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done."
#: Every tool of a run without a terminal but the shell and those for files.
OTHER_TOOLS = (
    "agent",
    "cron_create",
    "cron_delete",
    "cron_list",
    "enter_worktree",
    "exit_worktree",
    "get_goal",
    "glob",
    "grep_search",
    "list_agents",
    "loop_wakeup",
    "monitor",
    "notebook_edit",
    "read_mcp_resource",
    "record_artifact",
    "report_findings",
    "send_message",
    "skill",
    "task_stop",
    "tool_call",
    "tool_search",
    "update_goal",
    "web_fetch",
    "zoom_image",
)
#: What every first prompt says of the day.
STEADY = (
    Rewrite(
        "date",
        re.compile(r"<system-reminder>\nThe current date is: [^\n]*\n</system-reminder>\n"),
        role="user",
    ),
)
SHELL = Shell("run_shell_command")
QUIET: Mapping[str, str] = {
    "QWEN_CODE_NO_RELAUNCH": "true",
    "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    "QWEN_CODE_DISABLE_PRECONNECT": "1",
    "QWEN_CODE_DISABLE_EARLY_CAPTURE": "1",
    "QWEN_DISABLE_AUTO_TITLE": "1",
    "QWEN_USAGE_STATISTICS_ENABLED": "false",
    "QWEN_STREAM_MAX_LIFETIME_MS": "0",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
}


class QwenCodeHarness(BaseModel):
    """Runs ``qwen`` against the rollout's endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: four tools under a prompt of one line. ``stock``: what its users have."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of its command line."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        package = install.PACKAGES[NAME]
        # arguments that are no object come back as others, with the call's id and an error
        steady = STEADY if self.profile == "lean" else ()
        dialect = Dialect(tolerates=SAFE | {Tolerance.REWRITTEN_ARGUMENTS}, stabilise=steady)
        return HarnessInfo(
            NAME, "Qwen Code", package.version, "Apache-2.0", ("openai_chat",), package.install_mb, dialect, SHELL
        )

    def mounts(self) -> Sequence[Mount]:
        """Qwen Code's folder, compile cache included, and Node.

        Raises:
            HarnessNotInstalled: with the command that installs it.
            HarnessError: there is no suitable Node.
        """
        return (Mount(install.require(NAME), TARGET), Mount(install.find_node().executable, NODE_TARGET))

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        folder, node = (sandbox.inside(mount) for mount in self.mounts())
        return Launch(
            argv=[node, install.PACKAGES[NAME].program(folder), *self._arguments(sandbox)],
            env={
                **QUIET,
                "OPENAI_API_KEY": context.api_key,
                "OPENAI_BASE_URL": f"{context.base_url}/v1",
                "OPENAI_MODEL": context.model,
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
                "NODE_COMPILE_CACHE": f"{folder}/{install.COMPILE_CACHE}",
                "NODE_COMPILE_CACHE_PORTABLE": "1",
            },
            files=self._files(context),
            stdin=context.instruction.encode(),
        )

    def _arguments(self, sandbox: Sandbox) -> list[str]:
        run = ["--auth-type", "openai", "--yolo", "--output-format", "stream-json", "--chat-recording", "false"]
        if self.profile == "lean":
            run += ["--system-prompt", PROMPT.format(workspace=sandbox.workspace)]
        return [*run, *self.extra_args]

    def _files(self, context: LaunchContext) -> dict[str, bytes]:
        files = {SETTINGS: json.dumps(self._settings(context), indent=1).encode()}
        if self.profile == "lean":  # else it writes a page on languages there, and reads it into the prompt
            files["~/.qwen/output-language.md"] = b"<!-- qwen-code:llm-output-language: auto -->\n"
        return files

    def _settings(self, context: LaunchContext) -> dict[str, Any]:
        """``settings.json``: the one model there is, wait as long as it takes, ask and tell nobody else."""
        lean: dict[str, Any] = {
            "tools": {"disabled": list(OTHER_TOOLS), "toolSearch": {"enabled": False}, "useRipgrep": False},
            "skills": {"disabledLevels": ["project", "user", "extension", "bundled"]},
        }
        never_clear = {"clearContextOnIdle": {"toolResultsThresholdMinutes": -1}}  # the size that clears them included
        return {
            **(lean if self.profile == "lean" else {}),
            "context": {**never_clear, **({"fileName": "no-such-file.md"} if self.profile == "lean" else {})},
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": "openai"}},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "model": {
                "name": context.model,
                "skipNextSpeakerCheck": True,
                "skipLoopDetection": True,
                "skipStartupContext": self.profile == "lean",
                "generationConfig": {
                    "timeout": DAY_MS,
                    "streamIdleTimeoutMs": DAY_MS,
                    "maxRetries": 0,
                    "contextWindowSize": context.max_context,
                    "samplingParams": {"max_tokens": context.max_tokens},
                },
            },
        }

    def exit_error(self, result: ExecResult) -> str | None:
        """Why Qwen Code failed, in one line; ``None`` when it ended as it should."""
        if result.rc < 0:
            return f"Qwen Code was killed by signal {-result.rc}"
        end = _end(result.stdout)
        if result.rc == 0 and (result.truncated if end is None else not end.get("is_error")):
            return None
        said = end.get("error") if end is not None else None
        if isinstance(said, Mapping) and said.get("message"):
            return " ".join(str(said["message"]).split())[:500]
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1][:500]
        return f"Qwen Code ended with exit code {result.rc}" + (" and no result" if end is None else "")


def _end(stdout: bytes) -> Mapping[str, Any] | None:
    """The object that says how a run ended; ``None`` when the output holds none."""
    for line in reversed(stdout.decode(errors="replace").splitlines()):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, Mapping) and told.get("type") == "result":
            return told
    return None
