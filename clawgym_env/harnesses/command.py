"""Any program that takes a base URL, described by settings: no module of its own is needed.

Invariant: what is written in the settings is what runs. Placeholders are filled in once, in one pass, so nothing that a
task says is ever read as a placeholder; a name in braces that stands for nothing is refused before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from clawgym_env.dialect import SAFE, Dialect, Tolerance
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext, Shell, Wire
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

MOUNT_FOLDER = "/opt/clawgym/command"
#: What stands in braces: a doubled brace is a plain one, and shell's ``${name}`` is left alone.
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|(?<!\$)\{([a-z_]+)\}")
#: What each placeholder stands for.
VALUES: Mapping[str, Callable[[LaunchContext, Sandbox], str]] = {
    "instruction": lambda context, sandbox: context.instruction,
    "base_url": lambda context, sandbox: context.base_url,
    "openai_base_url": lambda context, sandbox: f"{context.base_url}/v1",
    "api_key": lambda context, sandbox: context.api_key,
    "model": lambda context, sandbox: context.model,
    "max_context": lambda context, sandbox: str(context.max_context),
    "max_tokens": lambda context, sandbox: str(context.max_tokens),
    "timeout_s": lambda context, sandbox: f"{context.timeout_s:g}",
    "workspace": lambda context, sandbox: sandbox.workspace,
    "home": lambda context, sandbox: sandbox.home,
}


class CommandHarness(BaseModel):
    """Runs one command line in the workspace.

    In ``argv``, ``env`` and ``files`` these stand for what they say: ``{instruction}``, ``{base_url}`` (for Anthropic's
    API, and for Gemini's with ``/v1beta`` behind it), ``{openai_base_url}`` (the same with ``/v1``), ``{api_key}``,
    ``{model}``, ``{max_context}``, ``{max_tokens}``, ``{timeout_s}``, ``{workspace}``, ``{home}``, and each name in
    ``mounts``. ``{{name}}`` is ``{name}`` itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: tuple[str, ...] = ()
    """The command line; its program is looked up in the sandbox."""

    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment, on top of the sandbox's PATH, HOME, LANG and TMPDIR."""

    files: Mapping[str, str] = Field(default_factory=dict)
    """Path (``~/...`` for HOME, else relative to the workspace) -> text, written before the start."""

    shown: Mapping[str, Path] = Field(default_factory=dict, alias="mounts")
    """Name -> file or folder of yours that the program needs inside, read-only; ``{name}`` is its path there."""

    stdin: Literal["instruction", "none"] = "instruction"
    """What the program reads."""

    success: frozenset[int] = frozenset({0})
    """Exit codes of a run that ended as it should."""

    name: str = Field(default="command", pattern=r"^[\w.-]+$")
    """What records and reports call this harness."""

    tolerates: frozenset[Tolerance] = SAFE
    """What the program may change in what it sends back without beginning a new conversation."""

    shell: Shell | None = Field(default_factory=Shell)
    """How a demonstrator runs commands through it and ends; ``None`` where the program offers no tool for commands."""

    @model_validator(mode="after")
    def _placeholders_exist(self) -> CommandHarness:
        taken = sorted(set(self.shown) & set(VALUES))
        if taken:
            raise ValueError(f"mounts: {', '.join(taken)} mean something else already; choose other names")
        odd = [name for name in self.shown if not re.fullmatch(r"[a-z_]+", name)]
        if odd:
            raise ValueError(f"mounts: names are lower-case letters and underscores, unlike {', '.join(odd)}")
        known = {*VALUES, *self.shown}
        for text in (*self.argv, *self.env.values(), *self.files.values()):
            for match in PLACEHOLDER.finditer(text):
                if match[2] is not None and match[2] not in known:
                    plain = f"{{{match[2]}}}"
                    there_are = ", ".join(sorted(known))
                    raise ValueError(f"{plain} stands for nothing; there are {there_are}, and {{{plain}}} for itself")
        return self

    @property
    def info(self) -> HarnessInfo:
        """What ``clawgym harness list`` shows."""
        wires: tuple[Wire, ...] = get_args(Wire)
        dialect = Dialect(tolerates=self.tolerates)
        return HarnessInfo(self.name, "any command line", "", "yours", wires, 0, dialect, self.shell)

    def mounts(self) -> Sequence[Mount]:
        """What the settings name.

        Raises:
            ConfigError: no command line is given, or one of the paths does not exist.
        """
        if not self.argv:
            raise ConfigError("harness 'command' needs a command line: harness_options={'argv': ['my-agent', ...]}")
        for name, path in self.shown.items():
            if not path.expanduser().exists():
                raise ConfigError(f"harness 'command': mounts.{name}: there is no {path}")
        return [Mount(p.expanduser().resolve(), f"{MOUNT_FOLDER}/{name}") for name, p in self.shown.items()]

    def launch(self, context: LaunchContext, sandbox: Sandbox) -> Launch:
        """The settings with every placeholder filled in."""
        values = {name: value(context, sandbox) for name, value in VALUES.items()}
        values |= {name: sandbox.inside(mount) for name, mount in zip(self.shown, self.mounts(), strict=True)}

        def fill(text: str) -> str:
            return PLACEHOLDER.sub(lambda m: f"{{{m[1]}}}" if m[1] is not None else values[m[2]], text)

        return Launch(
            argv=[fill(part) for part in self.argv],
            env={name: fill(value) for name, value in self.env.items()},
            files={path: fill(text).encode() for path, text in self.files.items()},
            stdin=context.instruction.encode() if self.stdin == "instruction" else b"",
        )

    def exit_error(self, result: ExecResult) -> str | None:
        """Why the program failed, in one line; ``None`` when it ended as it should."""
        if result.rc in self.success:
            return None
        if result.rc < 0:
            return f"{self.name} was killed by signal {-result.rc}"
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:500]}" if lines else " and said nothing"
        return f"{self.name} ended with exit code {result.rc}{said}"
