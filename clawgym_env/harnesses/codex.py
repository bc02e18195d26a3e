"""Codex, OpenAI's agent, as a user who runs ``codex exec`` has it, and with a prompt that fits a small window.

Invariant: the first prompt of a task is the same in every rollout: the program is mounted at a fixed path, HOME and its
state are fresh, and all that Codex fetches, reports or remembers is off. Its own sandbox is off too: ours is around it.

It is a native program and needs no Node. The instruction goes in on stdin: as an argument it would be bounded by the
kernel. Codex ends with exit code 1 where its last turn failed, and says why in its events on stdout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.dialect import Dialect
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.harnesses.endings import after_events
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "codex"
TARGET = "/opt/clawgym/codex"
PROVIDER = "local"
KEY_VARIABLE = "CODEX_LOCAL_KEY"
DAY_MS = 24 * 3600 * 1000
LEAN_PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done."
CATALOG = "models.json"
#: What the lean profile goes without: tools, and texts in the prompt.
LEAN_OFF = ("goals", "view_image", "apps", "plugins", "tool_suggest", "shell_snapshot")
LEAN_SILENT = (
    "include_permissions_instructions",
    "include_environment_context",
    "include_apps_instructions",
    "include_collaboration_mode_instructions",
)
#: A thread is an agent; the main one has a name like the others.
DIALECT = Dialect(
    agent_header="thread-id",
    parent_header="x-codex-parent-thread-id",
    kind_header="x-openai-subagent",
    kinds={
        "collab_spawn": "subagent",
        "compact": "compaction",
        "review": "side",
        "memory_consolidation": "side",
    },
)
SHELL = Shell("exec_command", "cmd")


class CodexHarness(BaseModel):
    """Runs ``codex exec`` against the rollout's endpoint, over OpenAI responses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: a shell and a system prompt of one line. ``stock``: what Codex's users have."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of its command line."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        package = install.PACKAGES[NAME]
        return HarnessInfo(
            NAME, "Codex", package.version, "Apache-2.0", ("openai_responses",), package.install_mb, DIALECT, SHELL
        )

    def mounts(self) -> Sequence[Mount]:
        """The folder of the program, of its helpers and of ripgrep.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        program = Path(install.PACKAGES[NAME].program(str(install.require(NAME))))
        return (Mount(program.parents[1], TARGET),)

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        (folder,) = (sandbox.inside(mount) for mount in self.mounts())
        files = {"~/.codex/config.toml": _toml(self._config(context, sandbox))}
        if self.profile == "lean":
            files[f"~/.codex/{CATALOG}"] = json.dumps({"models": [self._model(context, sandbox)]}, indent=1)
        return Launch(
            argv=[f"{folder}/bin/codex", *self._arguments()],
            env={"CODEX_HOME": f"{sandbox.home}/.codex", KEY_VARIABLE: context.api_key},
            files={path: text.encode() for path, text in files.items()},
            stdin=context.instruction.encode(),
        )

    def _arguments(self) -> list[str]:
        arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
        return [*arguments, "--ephemeral", *self.extra_args, "-"]

    def _config(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, Any]:
        """``config.toml``: the one model there is, and nothing asked of anyone but its endpoint."""
        config: dict[str, Any] = {
            "model": context.model,
            "model_provider": PROVIDER,
            "model_context_window": context.max_context,
            "web_search": "disabled",
            "check_for_update_on_startup": False,
            "model_providers": {
                PROVIDER: {
                    "name": PROVIDER,
                    "base_url": f"{context.base_url}/v1",
                    "wire_api": "responses",
                    "env_key": KEY_VARIABLE,
                    "request_max_retries": 0,
                    "stream_max_retries": 0,
                    "stream_idle_timeout_ms": DAY_MS,
                }
            },
            "analytics": {"enabled": False},
            "otel": {"exporter": "none"},
        }
        if self.profile == "lean":
            config |= dict.fromkeys(LEAN_SILENT, False) | {
                "model_catalog_json": f"{sandbox.home}/.codex/{CATALOG}",
                "project_doc_max_bytes": 0,
            }
            config["agents"] = {"enabled": False}
            config["features"] = dict.fromkeys(LEAN_OFF, False)
            config["skills"] = {"include_instructions": False, "bundled": {"enabled": False}}
            config["tools"] = {"experimental_request_user_input": {"enabled": False}}
        return config

    def _model(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, Any]:
        """The lean profile's model in Codex's catalogue of models: there its prompt and tools are chosen."""
        return {
            "slug": context.model,
            "display_name": context.model,
            "description": "",
            "base_instructions": LEAN_PROMPT.format(workspace=sandbox.workspace),
            "shell_type": "shell_command",
            "context_window": context.max_context,
            "truncation_policy": {"mode": "tokens", "limit": min(10_000, context.max_context // 4)},
            "supports_parallel_tool_calls": True,
            "supports_reasoning_summaries": True,
            "supports_reasoning_summary_parameter": True,
            "supported_reasoning_levels": [],
            "support_verbosity": False,
            "input_modalities": ["text"],
            "experimental_supported_tools": [],
            "supported_in_api": True,
            "visibility": "list",
            "priority": 1,
        }

    def exit_error(self, result: ExecResult) -> str | None:
        """Why Codex failed, in one line; ``None`` when it ended as it should."""
        return after_events(result, "Codex", "turn", *_ending(result.stdout))


def _ending(stdout: bytes) -> tuple[bool, str | None]:
    """Whether the events tell of a turn that was completed, and the last failure that they tell of."""
    ended, why = False, None
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("type") == "turn.completed":
            ended, why = True, None
        elif event.get("type") == "turn.failed":
            error = event.get("error")
            why = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return ended, why


def _toml(config: Mapping[str, Any]) -> str:
    """A TOML document of scalars, lists and tables; JSON's strings and numbers are TOML's."""
    return "\n".join(_lines(config, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"[{'.'.join(path)}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key))
