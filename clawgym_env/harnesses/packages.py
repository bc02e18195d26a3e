"""What is installed for each harness, pinned.

Invariant: a version here is one that the harness's module was tried with; it is changed together with that module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clawgym_env.harnesses.node import Node
from clawgym_env.harnesses.npm import NpmPackage


class Package(Protocol):
    """Something that a package manager installs into a folder."""

    @property
    def package(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def install_mb(self) -> int: ...

    @property
    def proprietary(self) -> str: ...

    @property
    def folder_name(self) -> str: ...

    def program(self, folder: str) -> str:
        """What is run, where ``folder`` is the install as seen from where it runs."""
        ...

    def node(self) -> Node | None:
        """The Node that it runs on; ``None`` where it needs none."""
        ...

    def fetch(self, folder: Path, cache: Path, progress: Callable[[str], None]) -> None:
        """Installs into a folder that is yet to be made."""
        ...

    def versions(self, folder: Path) -> dict[str, str]:
        """Version of each package that matters, by what lies in the folder."""
        ...


PACKAGES: dict[str, Package] = {
    "pi": NpmPackage(
        "@earendil-works/pi-coding-agent",
        "1.6.0",
        "dist/bundle/cli.js",
        168,
        integrity={
            "@earendil-works/pi-coding-agent": (
                "sha512-zX1BVEsshx7A2MRuQ6jfr3RJGWw4Wn+vLq5ZfmlvS1RskhRmByaSZVXH/zcwRrWHO7qPgs98pNCbPOEti/t0fQ=="
            ),
        },
    ),
    "claude-code": NpmPackage(
        "@anthropic-ai/claude-code",
        "2.1.332",
        "claude",
        384,
        native="@anthropic-ai/claude-code-linux-{cpu}",
        proprietary="Claude Code is not open source; its use is subject to Anthropic's terms",
        integrity={
            "@anthropic-ai/claude-code": (
                "sha512-tvSh6bLvEbd97APD31AnojOrRC3AmcRj5R8sF8QIQitu3x2ucOb1kKmTkGDw41kjva+CGJfpkt+wYouk6yv56Q=="
            ),
            "@anthropic-ai/claude-code-linux-x64": (
                "sha512-f4JWhzwYutJIHScC7/dYOPX6s28tt7ZADhsOi8zwOHq5fFPEuUeChh2NMfinSg0GrUckYxaeebC4h0DqiKzLcw=="
            ),
            "@anthropic-ai/claude-code-linux-arm64": (
                "sha512-BlHNEtK38KBPWU31F4lUSS9sHclCyfWbThT1CErvxxH8+XcljYLZlQwdyXBkTD62rw1TgfE1u1a+quMWS0NSJg=="
            ),
        },
    ),
    "codex": NpmPackage(
        "@openai/codex",
        "0.171.0",
        "vendor/{machine}-unknown-linux-musl/bin/codex",
        424,
        native="@openai/codex-linux-{cpu}",
        integrity={
            "@openai/codex": (
                "sha512-1IOFzL2Xg86tLdw6kDo3GoKbkQENgQi7TI6rlEvN132R7ngSw7SNOIQoTcnKzSZZ8kf9N9GynCweSoaFbqk2Eg=="
            ),
            "@openai/codex-linux-x64": (
                "sha512-l66NZkQgdk2C3pbcfULDz42yEUB581MVA6I+Y43Wp4OIqEy73HCdmZ0GTjeAHY2ycuH4N00d9VsLrwT1jxshTw=="
            ),
            "@openai/codex-linux-arm64": (
                "sha512-9z17t4bbUJ9UCIb49O4PoA+ki+45q3rd8nZ8PeH6sYnlKkBld/Xpo/OS3h3Ti954+foshX4o7k5TCU8N7zzqQA=="
            ),
        },
    ),
}
