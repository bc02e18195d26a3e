"""What is installed for each harness, pinned.

Invariant: a version here is one that the harness's module was tried with; it is changed together with that module.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clawgym_env.harnesses.node import Node
from clawgym_env.harnesses.npm import NpmPackage
from clawgym_env.harnesses.pypi import LOCKS, PythonPackage

#: Wheels of nanobot differ by processor: they hold its terminal program.
NANOBOT_WHEELS = {
    "x86_64": "sha256:8cfbfb7e90473f32364b6692ab0bb82bf51688f03624eb436b3459b2d4941b98",
    "aarch64": "sha256:eb75bbdb30340a78a4df6ad4ce1f9415b047a901b1c31d4070e1333db7a6286c",
}


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


MINI_SWE_AGENT = PythonPackage(
    "mini-swe-agent",
    "2.4.6",
    "mini",
    390,
    LOCKS / "mini-swe-agent.txt",
    integrity={"mini-swe-agent": "sha256:a35463c553ac825c7773b03cfa69cd44958e3af20155dcc5711fdf9e4c67cd54"},
)

HERMES = PythonPackage(
    "hermes-agent",
    "0.19.0",
    "hermes",
    204,
    LOCKS / "hermes.txt",
    integrity={"hermes-agent": "sha256:bd0bac012aee38a60894781f4597dc29ee7bedb3448540249921f10d3bef327f"},
)

NANOBOT = PythonPackage(
    "nanobot-ai",
    "0.3.5",
    "nanobot",
    367,
    LOCKS / "nanobot.txt",
    integrity={"nanobot-ai": NANOBOT_WHEELS.get(platform.machine(), "")},
)

OPENAI_AGENTS = PythonPackage(
    "openai-agents",
    "0.24.0",
    "",
    100,
    LOCKS / "openai-agents.txt",
    integrity={"openai-agents": "sha256:18d4ac34e84ed937333ec8ce46395ed3521ffcbb0a521780a4c2eaa451467f49"},
)

OPENHANDS = PythonPackage(
    "openhands-sdk",
    "1.58.2",
    "",
    455,
    LOCKS / "openhands.txt",
    integrity={
        "openhands-sdk": "sha256:78e0452df8e75c970922f1e0cf1938a0f2a33a1a71f5a89de92e0970aa5ef96e",
        "openhands-tools": "sha256:d163d9c8346ab262539deb7ae5750cd8cfae3af90cd915b9980428aba421fcb0",
    },
    oldest_python=(3, 12),
)

SMOLAGENTS = PythonPackage(
    "smolagents",
    "1.26.0",
    "smolagent",
    110,
    LOCKS / "smolagents.txt",
    integrity={"smolagents": "sha256:70e1cfb1576f782da93190ee31d9bb2659e5ca4bd84fda0c412e1f20498f28b6"},
)

PACKAGES: dict[str, Package] = {
    "mini-swe-agent": MINI_SWE_AGENT,
    "openai-agents": OPENAI_AGENTS,
    "openhands": OPENHANDS,
    "smolagents": SMOLAGENTS,
    "hermes": HERMES,
    "nanobot": NANOBOT,
    "openclaw": NpmPackage(
        "openclaw",
        "2026.9.6",
        "openclaw.mjs",
        684,
        integrity={
            "openclaw": (
                "sha512-Ie0kyQSCVfFqixsgVg39vevUDq01Ch5u3+7Yu5Y3qARczmdAe+lzp8bVnO9925rHiW/+CFp70zfORCyPmCH31g=="
            ),
        },
        oldest_node=(24, 16),
        below_node=(25, 0),
    ),
    "opencode": NpmPackage(
        "opencode-ai",
        "1.18.33",
        "bin/opencode",
        354,
        native="opencode-linux-{cpu}",
        integrity={
            "opencode-ai": (
                "sha512-58P1ffLRXiAY4QeoABqUjqf6DEzm1ihpovvn9Ad+oOLbLiwK/rf88wruT9IATJ7AtNjmi8iA7pC8tN4o5y799Q=="
            ),
            "opencode-linux-x64": (
                "sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw=="
            ),
        },
    ),
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
    "qwen-code": NpmPackage(
        "@qwen-code/qwen-code",
        "0.24.4",
        "cli.js",
        162,
        integrity={
            "@qwen-code/qwen-code": (
                "sha512-pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg=="
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
