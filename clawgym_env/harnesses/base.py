"""What a harness is to us: a black box with a model endpoint.

Invariant: a harness module knows how to configure, launch and read the exit of one program, and nothing of the proxy.
It is given a URL. Every special case of a harness lives in its module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import ConfigDict

from clawgym_env.dialect import Dialect
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox
from clawgym_env.types import Message, ToolCall

Wire = Literal["openai_chat", "openai_responses", "anthropic_messages", "gemini"]


@dataclass(frozen=True, slots=True)
class Shell:
    """How a policy works through a harness: what demonstrators, the warm-up and the conformance suite say.

    Attributes:
        tool: The tool that runs a shell command in the workspace.
        argument: Its argument that is the command.
        others: Further arguments that the tool requires.
        end: The call that ends a run, where an answer without a call does not.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is a setting

    tool: str = "bash"
    argument: str = "command"
    others: Mapping[str, Any] = field(default_factory=dict)
    end: ToolCall | None = None

    def call(self, command: str) -> ToolCall:
        """The call that runs a command."""
        return ToolCall(self.tool, {self.argument: command, **self.others})

    def last(self, text: str) -> Message:
        """The answer that ends a run."""
        return Message("assistant", text, tool_calls=() if self.end is None else (self.end,))


@dataclass(frozen=True, slots=True)
class HarnessInfo:
    """What ``clawgym harness list`` shows, and how the program is spoken to.

    Attributes:
        version: The pinned version; empty where nothing is installed.
        install_mb: Size on disk, roughly.
        dialect: How it speaks at the model boundary, where the safe default does not do.
        shell: How a policy runs commands and ends; ``None`` where there is no tool for commands.
    """

    name: str
    title: str
    version: str
    licence: str
    wires: Sequence[Wire]
    install_mb: int
    dialect: Dialect = field(default_factory=Dialect)
    shell: Shell | None = field(default_factory=Shell)


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a harness is told about one rollout.

    Attributes:
        base_url: The rollout's model endpoint, path prefix included, without ``/v1``.
        model: Model name to ask for.
        max_context: Context window of the policy in tokens.
        max_tokens: Most tokens of one answer.
    """

    instruction: str
    base_url: str
    api_key: str
    model: str
    max_context: int
    max_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """A configured command line.

    Attributes:
        files: Path (``~/...`` for HOME, else relative to the workspace) -> content, written before the start.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""


@runtime_checkable
class Harness(Protocol):
    """One agent program."""

    @property
    def info(self) -> HarnessInfo: ...

    def mounts(self) -> Sequence[Mount]:
        """Read-only host paths that the program needs inside.

        Raises:
            HarnessNotInstalled: with the command that installs it.
        """
        ...

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The command line, environment and config files of one rollout."""
        ...

    def exit_error(self, result: ExecResult) -> str | None:
        """Why the program failed, in one line; ``None`` when it ended as it should.

        An exit code of 0 is not success: the workspace and the proxy's record decide that.
        """
        ...
