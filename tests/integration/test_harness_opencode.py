"""The real OpenCode, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

import pytest

from clawgym_env.harnesses import OpenCodeHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.harnesses.opencode import CONFIG
from clawgym_env.types import ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_suite import HarnessSuite

LIMIT_S = 120.0


pytestmark = pytest.mark.skipif(install.installed("opencode") is None, reason="OpenCode is not installed")


def start(task: str) -> ToolCall:
    return ToolCall("task", {"description": "A part", "prompt": task, "subagent_type": "general"})


class TestOpenCode(HarnessSuite):
    """The lean profile."""

    limit_s: ClassVar[float] = LIMIT_S
    concurrency: ClassVar[int] = 2
    documented: ClassVar[Mapping[str, str]] = {"taken out of prompts": "the day, which it always writes"}
    small_context: ClassVar[int] = 4_000
    runs_whole_calls: ClassVar[bool] = True

    def harness(self) -> OpenCodeHarness:
        return OpenCodeHarness()

    def delegation(self) -> Delegation:
        return Delegation(OpenCodeHarness(profile="stock"), start)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        (provider,) = json.loads(launch.files[CONFIG])["provider"].values()
        options = provider["options"]
        assert options["timeout"] is options["headerTimeout"] is False
        return {"between pieces": options["chunkTimeout"] / 1000}
