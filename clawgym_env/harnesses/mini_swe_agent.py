"""mini-swe-agent, the reference harness: one ``bash`` tool, no compaction, no sub-agents, turns sent back verbatim.

Invariant: the first prompt of a task is the same in every rollout: the program is mounted at a fixed path, HOME is
fresh, and all that differs from what its users have is a file of its own configuration and environment variables.

The task is in that file: as an argument it would be bounded by the kernel. It ends when the policy runs its submit
command. An answer that it cannot use it takes out of the conversation, and puts a complaint of its own in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell
from clawgym_env.harnesses.merging import merged
from clawgym_env.harnesses.packages import MINI_SWE_AGENT
from clawgym_env.harnesses.pypi import interpreter_mounts
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox
from clawgym_env.types import ToolCall

NAME = "mini-swe-agent"
TARGET = "/opt/clawgym/mini-swe-agent"
CLIENT = Path(__file__).with_name("drivers") / "mini_swe_agent_client.py"
CLIENT_TARGET = "/opt/clawgym/mini-swe-agent-client.py"
CONFIG = ".config/mini-swe-agent/rollout.yaml"
DAY_S = 24 * 3600
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SHELL = Shell(end=ToolCall("bash", {"command": SUBMIT}))
LEAN_PROMPT = "Work on the user's task with the tools, in {workspace}, until it is done. Then call bash with: {submit}"
LEAN_TEXT_PROMPT = """\
Work on the user's task in {workspace}, until it is done. Each answer holds one bash command:
```mswea_bash_command
ls
```
At the end, the command is: {submit}"""
LEAN_ERROR = (
    "{% if finish_reason is defined and finish_reason == 'length' %}The answer was cut off. {% endif %}{{ error }}"
)
#: ``limit`` characters of a result are shown, half of them of its end.
LEAN_RESULT = """\
{% if output.exception_info %}{{ output.exception_info }}
{% elif output.returncode %}exit code {{ output.returncode }}
{% endif %}{% set text = output.output %}{% if text | length <= limit %}{{ text or '(no output)' }}{% else %}\
{{ text[:limit // 2] }}
... {{ text | length - limit }} characters left out ...
{{ text[-(limit // 2):] }}{% endif %}"""
MOST_RESULT_CHARACTERS = 10_000
#: What ends a run beside the submit command, as its output tells it.
GAVE_UP = re.compile(r"^Exit:\s+(RepeatedFormatError|LimitsExceeded|TimeExceeded)\s*$", re.MULTILINE)


class MiniSweAgentHarness(BaseModel):
    """Runs ``mini`` against the rollout's endpoint, over OpenAI chat completions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["lean", "stock"] = "lean"
    """``lean``: a prompt of one line, and a client that starts at once. ``stock``: its own prompt, over LiteLLM."""

    text_only: bool = False
    """Commands come in the text of answers, in fences, instead of calls of a tool."""

    config: Mapping[str, Any] = Field(default_factory=dict)
    """Further configuration as in its YAML files, on top: ``{"environment": {"timeout": 120}}``."""

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        return HarnessInfo(
            NAME,
            "mini-swe-agent",
            MINI_SWE_AGENT.version,
            "MIT",
            ("openai_chat",),
            MINI_SWE_AGENT.install_mb,
            shell=None if self.text_only else SHELL,
        )

    def mounts(self) -> Sequence[Mount]:
        """Its packages, the lean profile's client, and the Python that runs them.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        return (Mount(install.require(NAME), TARGET), Mount(CLIENT, CLIENT_TARGET), *interpreter_mounts())

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config file of one rollout."""
        folder, client, *_ = (sandbox.inside(mount) for mount in self.mounts())
        own = f"{sandbox.home}/{CONFIG}"
        variant = "_textbased" if self.text_only else ""
        if self.profile == "lean":
            command = [*MINI_SWE_AGENT.command(folder, client), "--output", "/dev/null"]
            command += ["--model-class", "__main__.TextModel" if self.text_only else "__main__.ChatModel"]
            model, configs = context.model, [own]
        else:
            command = [*MINI_SWE_AGENT.command(folder), "--model-class", f"litellm{variant}"]
            model, configs = f"openai/{context.model}", [f"mini{variant}.yaml", own]
        arguments = ["--yolo", "--exit-immediately", "--cost-limit", "0", "--model", model]
        return Launch(
            argv=[*command, *arguments, *(part for path in configs for part in ("--config", path))],
            env={
                "OPENAI_API_BASE": f"{context.base_url}/v1",
                "OPENAI_API_KEY": context.api_key,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_TELEMETRY": "False",
                "TYPER_STANDARD_TRACEBACK": "1",
            },
            files={f"~/{CONFIG}": _yaml(self._config(context, sandbox)).encode()},
        )

    def _config(self, context: LaunchContext, sandbox: Sandbox) -> dict[str, Any]:
        """What mini is told beside its own configuration, or in its place."""
        config: dict[str, Any] = {"run": {"task": context.instruction}}
        if self.profile == "lean":
            prompt = LEAN_TEXT_PROMPT if self.text_only else LEAN_PROMPT
            limit = min(MOST_RESULT_CHARACTERS, context.max_context)
            config["agent"] = {
                "system_template": prompt.format(workspace=sandbox.workspace, submit=SUBMIT),
                "instance_template": "{{task}}",
            }
            config["model"] = {
                "format_error_template": LEAN_ERROR,
                "observation_template": f"{{% set limit = {limit} %}}{LEAN_RESULT}",
                "model_kwargs": {"max_tokens": context.max_tokens},
            }
        else:
            kwargs = {"max_tokens": context.max_tokens, "max_retries": 0, "timeout": DAY_S}
            config["model"] = {"model_kwargs": kwargs}
        return merged(config, self.config)

    def exit_error(self, result: ExecResult) -> str | None:
        """Why mini failed, in one line; ``None`` when it ended as it should."""
        if result.rc < 0:
            return f"mini-swe-agent was killed by signal {-result.rc}"
        if result.rc == 0:
            gave_up = GAVE_UP.findall(result.stdout.decode(errors="replace"))
            return gave_up[-1] if gave_up else None
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else f"mini-swe-agent ended with exit code {result.rc} and said nothing"


def _yaml(value: object) -> str:
    """A YAML document; unlike in JSON's, any character may be in a string."""
    if isinstance(value, Mapping):
        return "{" + ",\n ".join(f"{_yaml(str(key))}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in value) + '"'
    return json.dumps(value)
