"""The doctor's findings: true of this machine, and of a model's chat format as rollouts will meet it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from clawgym_env.doctor import Check, check_machine, check_model
from clawgym_env.harnesses import HARNESSES
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.sandboxes import BACKENDS, get_backend
from tests.chat_families import FAMILIES, tokenizer_for

CONTINUED = [
    "second turn",
    "tool result",
    "parallel tool results",
    "mid-list system message",
    "truncated answer",
    "thinking, tool result",
    "thinking, second turn",
]


def rows(path: Path, family: str = "qwen3") -> dict[str, Check]:
    checks = list(check_model(path, family))
    assert len({c.name for c in checks}) == len(checks)
    return {c.name: c for c in checks}


def states(found: dict[str, Check], *but: str) -> set[str]:
    return {check.state for name, check in found.items() if name not in but}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without weights."""
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED_TOKENIZER, folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": 2048}))
    return folder


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_this_machine(empty_cache: Path) -> None:
    found = {c.name: c for c in check_machine()}
    boxes = {f"sandbox {name}" for name in BACKENDS}
    harnesses = {f"harness {name}" for name in HARNESSES}
    assert set(found) == {"python", "node", "training", "cache", "resources"} | boxes | harnesses
    assert found["python"].state == "ok"
    can_box = get_backend("bubblewrap").probe().available
    assert found["sandbox bubblewrap"].state == ("ok" if can_box else "failed")
    assert found["harness scripted"].state == found["harness command"].state == "ok"
    assert "needs a command line" in found["harness command"].advice
    assert found["harness pi"].state == "warning" and "clawgym harness install pi" in found["harness pi"].detail
    assert found["cache"] == Check("cache", "ok", str(empty_cache))
    assert list(empty_cache.iterdir()) == []
    assert "core" in found["resources"].detail and "GiB of memory free" in found["resources"].detail


def test_a_cache_that_cannot_be_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "file" / "cache"))
    (cache,) = (c for c in check_machine() if c.name == "cache")
    assert cache.state == "failed" and "Not a directory" in cache.detail and "CLAWGYM_CACHE" in cache.advice


def test_our_own_chat_format(model: Path) -> None:
    found = rows(model)
    assert states(found, "thinking, second turn") == {"ok"}
    assert found["context length"].detail == "4096 tokens"
    assert found["chat tokens"].detail == "<|im_start|> <|im_end|> <think> </think>"
    assert found["tool-call tokens"].detail == "<tool_call> </tool_call>"
    assert found["thinking tokens"].detail == "between <think> and </think>"
    assert found["stop tokens"].detail == "<|im_end|> (2), <|endoftext|> (0)"
    assert all("append-only" in found[name].detail for name in CONTINUED[:-1])
    fork = found["thinking, second turn"]
    assert fork.state == "warning"
    assert "one new branch at each such turn: the template drops thinking at a new user message" in fork.detail


def test_a_run_folder_stands_for_its_policy(model: Path) -> None:
    model.rename(model.with_name("policy"))
    assert str(model.with_name("policy")) in rows(model.parent)["tokenizer"].detail


def test_a_tokenizer_alone_is_enough() -> None:
    found = rows(SHIPPED_TOKENIZER / "tokenizer.json")
    assert found["context length"].state == "warning" and "no config.json" in found["context length"].detail
    assert states(found, "context length", "thinking, second turn") == {"ok"}


def test_nothing_there() -> None:
    (only,) = check_model(Path("/nowhere"))
    assert (only.name, only.state) == ("tokenizer", "failed")
    assert "no tokenizer at /nowhere" in only.detail


def test_a_family_that_the_tokenizer_does_not_know(model: Path) -> None:
    found = rows(model, "llama-3")
    assert found["chat format"].state == "failed" and "<|begin_of_text|>" in found["chat format"].detail
    assert "second turn" not in found


@pytest.mark.parametrize("family", ["nope", "auto", "default"])
def test_a_family_that_there_is_not(model: Path, family: str) -> None:
    assert rows(model, family)["chat format"].state == "failed"


@pytest.mark.parametrize(
    ("config", "state", "detail"),
    [
        ('{"text_config": {"max_position_embeddings": 262144}}', "ok", "262144 tokens"),
        ('{"n_positions": 1024}', "ok", "1024 tokens"),
        ("{}", "warning", "config.json does not say"),
        ("{", "failed", "config.json is no JSON"),
        ("[]", "failed", "config.json is no JSON object"),
    ],
)
def test_context_length(model: Path, config: str, state: str, detail: str) -> None:
    (model / "config.json").write_text(config)
    found = rows(model)["context length"]
    assert found.state == state and detail in found.detail


def test_a_model_with_fewer_embeddings_than_tokens_fails(model: Path) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 2000}')
    found = rows(model)["vocabulary"]
    assert found.state == "failed" and "2048 tokens, the model only 2000" in found.detail


def test_a_normaliser_is_noticed(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(model / "tokenizer.json"))
    found = rows(model)["round trip"]
    assert found.state == "warning" and r"'e\u0301' -> '\xe9'" in found.detail


def test_a_mark_that_text_cannot_reach_is_noticed(model: Path) -> None:
    """In the vocabulary, so that the renderer finds it, but no added token: text that spells it is torn."""
    data = json.loads((model / "tokenizer.json").read_text())
    (mark,) = (t for t in data["added_tokens"] if t["content"] == "<tool_call>")
    data["added_tokens"].remove(mark)
    data["model"]["vocab"]["<tool_call>"] = mark["id"]
    (model / "tokenizer.json").write_text(json.dumps(data))
    found = rows(model)["tool-call tokens"]
    assert found.state == "failed" and "<tool_call>" in found.detail


def test_another_end_of_turn_is_noticed(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"eos_token": "</tools>"}')
    found = rows(model)["stop tokens"]
    assert found.state == "warning" and "</tools>, is none of them" in found.detail


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_every_row(family: str, tmp_path: Path) -> None:
    tokenizer_for(family)._tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = rows(tmp_path, family)
    assert set(CONTINUED) < set(found)
    assert {name for name, check in found.items() if check.state == "failed"} <= {"tool calls"}


def test_what_the_rows_say_of_other_families(tmp_path: Path) -> None:
    def found(family: str) -> dict[str, Check]:
        tokenizer_for(family)._tokenizer.save(str(tmp_path / "tokenizer.json"))
        return rows(tmp_path, family)

    one = found("qwen3.5")
    assert one["chat format"].detail == (
        "qwen3.5, several leading system messages are held as one, later ones as user messages"
    )
    llama = found("llama-3")
    assert llama["tool-call tokens"].state == "warning" and llama["tool calls"].state == "warning"
    assert llama["thinking tokens"].detail == "this chat format has no thinking"
    kept = found("qwen3.8")
    assert kept["thinking, second turn"].state == "ok"
    reordered = found("gemma4")
    assert "rendered anew, it forks after" in reordered["tool result"].detail
