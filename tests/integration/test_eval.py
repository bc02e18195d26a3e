"""``clawgym eval`` against a real endpoint and a real folder, through a real harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clawgym_env.cli import app
from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.loop import LoopThread
from clawgym_env.proxy.app import Proxy
from clawgym_env.proxy.server import ProxyServer
from clawgym_env.proxy.session import Session
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.store import RunFolder
from clawgym_env.tasks.builtin import BuiltinSuite
from clawgym_env.types import Budget, TokenArray, ToolCall
from torchrl_ext.models import create_policy, save_policy

PLACE = ("--harness", "pi", "--tasks", "builtin", "--seed", "3")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An OpenAI-compatible server that knows the oracle: a proxy of ours with a scripted policy behind it."""
    renderer = ChatRenderer.from_folder()
    oracle = {t.instruction: t.oracle[0] for t in BuiltinSuite(1).sample("test", 14, seed=3)}

    def script(request: EngineRequest, turn: int) -> TokenArray:
        messages = request.chat.messages
        if messages[-1].role == "tool":
            return renderer.encode_reply("Done.")
        return renderer.encode_reply("", ToolCall("bash", {"command": oracle[messages[-1].content]}))

    async def start() -> ProxyServer:
        proxy = Proxy()
        server = await ProxyServer(proxy).__aenter__()
        proxy.register(Session("oracle", ScriptedEngine(script), renderer, budget=Budget(max_calls=1000)))
        return server

    loop = LoopThread("oracle")
    server = loop.run(start())
    yield f"{server.base_url}/rollout/oracle/v1"
    loop.run(server.__aexit__())
    loop.close()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def test_an_endpoint_that_knows_the_answers_passes_everything(endpoint: str, tmp_path: Path) -> None:
    result = invoke(*PLACE, "--endpoint", endpoint, "--n", "14", "--out", str(tmp_path / "measured"))
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["all"][1] == "100.0%" and lines["all"][-1] == "14/14"
    assert lines["csv"][-1] == "2/2"
    assert float(lines["all"][2]) == pytest.approx(78.5, abs=0.1), "Wilson interval of 14/14"
    stored = list(RunFolder.existing(tmp_path / "measured").rollouts("eval"))
    assert len(stored) == 14
    assert all((r.packed.versions[r.packed.sampled] == -1).all() for r in stored), "an endpoint's tokens never train"


def test_an_endpoint_that_is_not_there_scores_nothing(tmp_path: Path) -> None:
    result = invoke(*PLACE, "--endpoint", "http://127.0.0.1:9/v1", "--n", "2")
    assert result.exit_code == 0, result.output
    assert "engine_error 2" in result.stdout
    assert "0/0" in result.stdout


def test_a_local_policy(tmp_path: Path) -> None:
    folder = save_policy(create_policy(), SHIPPED_TOKENIZER, tmp_path / "policy")
    result = invoke(*PLACE, "--model", str(folder), "--n", "4", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "0/4" in result.stdout, "a policy that was never trained solves nothing"
