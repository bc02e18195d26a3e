"""OpenClaw, a personal assistant, over three wires: one turn without its gateway, or with one and sub-agents.

Invariant: the first prompt of a task is the same in every rollout of the lean profile: OpenClaw and Node are mounted at
fixed paths, its state is a fresh folder that is gone with the run, and what OpenClaw always writes of the minute, the
session and the machine is taken out of requests (``STEADY``). All that it fetches, reports or cleans up is off.

The instruction goes in on stdin: as an argument it would be bounded by the kernel. One JSON object on stdout says how
the run ended. OpenClaw consists of thousands of modules, and loading them is most of what a rollout costs: the compile
cache is shared, the two restarts of its launcher are left out, and so is the housekeeping of a store that is thrown
away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.dialect import SAFE, Dialect, Rewrite
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.harnesses.openclaw_gateway import QUIET_S, SUPERVISOR
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

NAME = "openclaw"
TARGET = "/opt/clawgym/openclaw"
NODE_TARGET = "/opt/clawgym/node/bin/node"
CONFIG = ".openclaw/openclaw.json"
PROVIDER = "local"
KEY_VARIABLE = "OPENCLAW_LOCAL_KEY"
DAY_S = 24 * 3600
KEEP_RECENT = 20_000  # OpenClaw's own, which is more than the whole window of a small policy
LEAN_TOOLS = ("read", "write", "edit", "exec")
SUBAGENT_TOOLS = ("sessions_spawn", "sessions_yield", "subagents")

OpenClawWire = Literal["openai_chat", "openai_responses", "anthropic_messages"]
#: Wire -> what OpenClaw calls it, and what its base URL ends in.
APIS: Mapping[OpenClawWire, tuple[str, str]] = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic_messages": ("anthropic-messages", ""),
}
RUNTIME = re.compile(r"\n+Runtime: agent=\S+ \| session=.*(?=\n|\Z)")
#: What OpenClaw writes into every prompt of the moment and the machine; where the last of it is depends on the wire.
STEADY = (
    Rewrite("date", re.compile(r"^## Temporal Context\nCurrent date: .*\nTime zone: .*\n", re.MULTILINE)),
    Rewrite("minute", re.compile(r"\A\[\w{3} \d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)? [^\]\s]+\] "), role="user"),
    Rewrite("session", RUNTIME, role="user"),
    Rewrite("session", RUNTIME, role="system"),
)
#: A session is an agent; the main one has a name like the others.
SESSION = re.compile(r"^Runtime: agent=\S+ \| session=(\S+)", re.MULTILINE)
SHELL = Shell("exec")
LEFT_BEHIND = "Agent exec cleanup failed"
QUIET = {
    "OPENCLAW_NO_AUTO_UPDATE": "1",
    "OPENCLAW_DISABLE_BONJOUR": "1",
    "OPENCLAW_SKIP_CHANNELS": "1",
    "OPENCLAW_EXEC_SHELL_SNAPSHOT": "0",
    "OPENCLAW_NO_RESPAWN": "1",
    "OPENCLAW_PACKAGED_COMPILE_CACHE_RESPAWNED": "1",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
}


class OpenClawHarness(BaseModel):
    """Runs OpenClaw against the rollout's endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: four tools and the shortest prompt that OpenClaw has. ``stock``: what its users have."""

    wire: OpenClawWire = "openai_chat"
    """API that OpenClaw speaks."""

    mode: Literal["exec", "gateway"] = "exec"
    """``exec``: ``openclaw agent exec``. ``gateway``: a gateway for this rollout alone, which sub-agents need."""

    tools: tuple[str, ...] | None = None
    """Tools that the model is offered, in place of the profile's."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of its command line."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        package = install.PACKAGES[NAME]
        steady = STEADY if self.profile == "lean" else ()
        dialect = Dialect(tolerates=SAFE, stabilise=steady, agent_text=SESSION)
        return HarnessInfo(NAME, "OpenClaw", package.version, "MIT", tuple(APIS), package.install_mb, dialect, SHELL)

    def mounts(self) -> Sequence[Mount]:
        """OpenClaw's folder, compile cache included, and Node.

        Raises:
            HarnessNotInstalled: with the command that installs it.
            HarnessError: there is no suitable Node.
        """
        node = install.PACKAGES[NAME].node()
        assert node is not None
        return (Mount(install.require(NAME), TARGET), Mount(node.executable, NODE_TARGET))

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        folder, node = (sandbox.inside(mount) for mount in self.mounts())
        program = install.PACKAGES[NAME].program(folder)
        return Launch(
            argv=[node, "--disable-warning=ExperimentalWarning", *self._arguments(program, sandbox)],
            env={
                **QUIET,
                KEY_VARIABLE: context.api_key,
                "OPENCLAW_STATE_DIR": f"{sandbox.home}/.openclaw",
                "OPENCLAW_CONFIG_PATH": f"{sandbox.home}/{CONFIG}",
                "NODE_COMPILE_CACHE": f"{folder}/{install.COMPILE_CACHE}",
                "NODE_COMPILE_CACHE_PORTABLE": "1",
            },
            files={f"~/{CONFIG}": json.dumps(self._config(context, sandbox), indent=1).encode()},
            stdin=context.instruction.encode(),
        )

    def _arguments(self, program: str, sandbox: Sandbox) -> list[str]:
        if self.mode == "gateway":
            return ["--input-type=module", "--eval", SUPERVISOR, program, str(QUIET_S), *self.extra_args]
        run = [program, "agent", "exec", "--config", f"{sandbox.home}/{CONFIG}", "--cwd", sandbox.workspace]
        return [*run, "--json", "--timeout", "0", *self.extra_args, "--message-file", "-"]

    def _config(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, Any]:
        """``openclaw.json``: the one model there is, and nothing asked of anyone but its endpoint."""
        defaults: dict[str, Any] = {
            "model": {"primary": f"{PROVIDER}/{context.model}"},
            "skipBootstrap": True,
            "sandbox": {"mode": "off"},
            "heartbeat": {"every": "0m"},
            "compaction": {"keepRecentTokens": min(KEEP_RECENT, context.max_context // 4)},
        }
        config: dict[str, Any] = {
            "models": {
                "mode": "replace",
                "catalogRefresh": {"enabled": False},
                "providers": {PROVIDER: self._provider(context)},
            },
            "agents": {"defaults": defaults},
            "session": {"maintenance": {"mode": "warn", "maxDiskBytes": False}},
            "logging": {"audit": {"enabled": False}},
            "update": {"checkOnStart": False},
            "telemetry": {"enabled": False},
        }
        tools = self.tools
        if tools is None and self.profile == "lean":
            tools = LEAN_TOOLS if self.mode == "exec" else LEAN_TOOLS + SUBAGENT_TOOLS
        if self.mode == "gateway":
            defaults["workspace"] = sandbox.workspace
            config["gateway"] = {"mode": "local", "controlUi": {"enabled": False}}
            config["discovery"] = {"mdns": {"mode": "off"}}
        if tools is not None:
            config["tools"] = {"allow": list(tools)}
        if self.profile == "lean":
            defaults |= {"contextInjection": "never", "skills": []}
            config["plugins"] = {"enabled": False}
            config["tools"] |= {"toolSearch": False}
            if "apply_patch" not in config["tools"]["allow"]:
                config["tools"] |= {"deny": ["apply_patch"]}  # else it comes with ``write``
        return config

    def _provider(self, context: LaunchContext) -> dict[str, Any]:
        api, path = APIS[self.wire]
        model = {
            "id": context.model,
            "name": context.model,
            "reasoning": True,  # else thinking is not sent back
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": context.max_context,
            "maxTokens": context.max_tokens,
        }
        return {
            "baseUrl": context.base_url + path,
            "apiKey": f"${{{KEY_VARIABLE}}}",
            "api": api,
            "timeoutSeconds": DAY_S,
            "models": [model],
        }

    def exit_error(self, result: ExecResult) -> str | None:
        """Why OpenClaw failed, in one line; ``None`` when it ended as it should."""
        if result.rc < 0:
            return f"OpenClaw was killed by signal {-result.rc}"
        said = _result(result.stdout)
        if said is None and result.truncated and result.rc == 0:
            return None  # more was written to its stdout than is kept, by a command that it ran
        if said is None:
            lines = result.stderr.decode(errors="replace").strip().splitlines()
            return lines[-1][:500] if lines else f"OpenClaw ended with exit code {result.rc} and no result"
        if result.rc == 0 and said.get("ok") is True:
            return None
        error = said.get("error")
        why = str(error.get("message", error.get("kind")) if isinstance(error, dict) else said.get("status"))
        if why.startswith(LEFT_BEHIND):
            return None  # said after a run that succeeded; the sandbox ends what the agent left running
        return " ".join(why.split())[:500]


def _result(stdout: bytes) -> dict[str, Any] | None:
    """The result object: the last one that begins at a line's start and has a status."""
    text = stdout.decode(errors="replace")
    for match in reversed([*re.finditer(r"^\{", text, re.MULTILINE)]):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(value, dict) and "ok" in value:
            return value
    return None
