"""The real pi over each of its four wires, held to what every harness must do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import Harness, PiHarness, get_harness, install
from clawgym_env.harnesses.base import Launch, Wire
from tests.conformance.harness_play import Played
from tests.conformance.harness_suite import HarnessSuite


@pytest.fixture(scope="module", autouse=True)
def pi_folder() -> Path:
    return install.ensure("pi", print)


class PiSuite(HarnessSuite):
    """pi, whatever its wire."""

    wire: ClassVar[Wire]

    def harness(self) -> Harness:
        return PiHarness(wire=self.wire)

    def thinking_harness(self) -> Harness:
        return PiHarness(wire=self.wire, thinking="high")

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        settings = json.loads(launch.files["~/.pi/agent/settings.json"])
        idle = settings["httpIdleTimeoutMs"]
        return {
            "idle": math.inf if idle == "disabled" else idle / 1000,
            "whole answer": settings["retry"]["provider"]["timeoutMs"] / 1000,
        }

    def test_what_is_documented_of_bad_calls(self, ordinary: Mapping[str, Played]) -> None:
        played = ordinary["malformed"]
        assert "echo hi" in played.results[0], played
        assert len(played.rollout.records) == 3, played
        (rewritten,) = {*played.rollout.ledger.notes} or {""}
        assert rewritten == ("tolerated: rewritten arguments" if self.wire.startswith("openai") else ""), played
        assert ordinary["unknown"].results[0] == "Tool no_such_tool not found"


def test_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match="settings of harness 'pi': wire"):
        get_harness("pi", wire="openai_assistants")


class TestPiChat(PiSuite):
    wire = "openai_chat"


class TestPiResponses(PiSuite):
    wire = "openai_responses"


class TestPiAnthropic(PiSuite):
    wire = "anthropic_messages"


class TestPiGemini(PiSuite):
    wire = "gemini"
