"""The shipped tokenizer and its loader, as the renderers and transformers see them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from renderers.base import OffsetTokenizer, Tokenizer
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer

from clawgym_env.errors import ConfigError
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER, load_tokenizer
from clawgym_env.tasks.builtin import BuiltinSuite
from clawgym_env.tasks.builtin.build_tokenizer import SPECIAL_TOKENS, build, corpus, main, slot_words, tool_call_text

TOKENIZER = load_tokenizer()


def test_it_is_what_renderers_ask_for() -> None:
    assert isinstance(TOKENIZER, Tokenizer)
    assert isinstance(TOKENIZER, OffsetTokenizer)
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 2048
    assert TOKENIZER.unk_token_id is None
    assert TOKENIZER.decode(TOKENIZER.eos_token_id or 0) == "<|im_end|>"
    assert TOKENIZER.decode([TOKENIZER.pad_token_id or 0]) == "<|endoftext|>"
    assert TOKENIZER.convert_tokens_to_ids(["<think>", "no such token"]) == [TOKENIZER.encode("<think>")[0], None]


def test_every_slot_word_is_one_token_in_each_of_its_places() -> None:
    for word in slot_words():
        assert len(TOKENIZER.encode(word)) == 1, word
        assert len(TOKENIZER.encode(f" {word}")) == 1, word
        for text in (f"*.{word}", f'"{word}"', f"/{word}/", f"{word}=", f"{word}.csv"):
            assert TOKENIZER.encode(word)[0] in TOKENIZER.encode(text), text
    for task in BuiltinSuite(1).sample("test", 210, seed=3):
        pieces = {TOKENIZER.decode(token).strip() for token in TOKENIZER.encode(task.instruction)}
        slots = {name: word for name, word in task.metadata["slots"].items() if name not in ("op", "unit")}
        assert set(slots.values()) <= pieces, task.instruction


def test_calls_are_short_and_digits_stand_alone() -> None:
    for task in BuiltinSuite(1).sample("test", 210, seed=3):
        assert len(TOKENIZER.encode(tool_call_text(task.oracle[0]))) <= 45
    assert [TOKENIZER.decode(token) for token in TOKENIZER.encode("8080")] == list("8080")


def test_special_tokens_are_single_and_first() -> None:
    assert [TOKENIZER.encode(token) for token in SPECIAL_TOKENS] == [[place] for place in range(len(SPECIAL_TOKENS))]


def test_offsets_cover_the_text() -> None:
    text = "Set mode to fast in server.conf. \u00e9\u4e2d"
    encoding = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = encoding["offset_mapping"]
    assert encoding["input_ids"] == TOKENIZER.encode(text)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    assert all(left[0] <= right[0] and left[1] <= right[1] for left, right in itertools.pairwise(spans))


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b\U0001f600")) == "a\ufffdb\U0001f600"


def test_qwen3_renderer_writes_and_reads_a_tool_call() -> None:
    renderer = Qwen3Renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
    command = """for f in *.txt; do mv "$f" "${f%.txt}.md"; done"""
    prompt = renderer.render([{"role": "user", "content": "Rename."}], add_generation_prompt=True)
    assert len(prompt.is_content) == len(prompt.token_ids)
    call = TOKENIZER.encode(f"<tool_call>{tool_call_text(command)}</tool_call><|im_end|>")
    parsed = renderer.parse_response(call, prompt_ids=prompt.token_ids)
    assert [(each.name, each.arguments) for each in parsed.tool_calls] == [("bash", {"command": command})]


def test_transformers_loads_the_same_tokenizer() -> None:
    theirs = AutoTokenizer.from_pretrained(SHIPPED_TOKENIZER)
    text = '<|im_start|>user\nGive all .txt files the extension .md.<|im_end|>\n<tool_call>\n{"name": "bash"}'
    assert theirs.encode(text, add_special_tokens=False) == TOKENIZER.encode(text)
    assert theirs.decode(TOKENIZER.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_loading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from clawgym_env.rendering.tokenizer import load_tokenizer; load_tokenizer(); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_folder_loads_and_others_are_refused(tmp_path: Path) -> None:
    shutil.copy(SHIPPED_TOKENIZER / "tokenizer.json", tmp_path)
    plain = load_tokenizer(tmp_path)
    assert (plain.eos_token_id, plain.name_or_path) == (None, str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "pad_token": null}')
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_token_id == TOKENIZER.eos_token_id
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with pytest.raises(ConfigError, match="<eos>"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "absent")


def test_building_is_repeatable_and_learns_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clawgym_env.tasks.builtin.build_tokenizer.TASKS_PER_LEVEL", {1: 200})
    prompt = "<|im_start|>system\nYou are a quizzical xylophone.<|im_end|>\n"
    built = build([prompt])
    assert built.to_str() == build([prompt]).to_str()
    assert built.encode(" xylophone").tokens == ["\u0120xylophone"]
    assert built.encode("<|im_start|>").ids == [1]
    (tmp_path / "prompt.txt").write_text(prompt)
    main([str(tmp_path / "prompt.txt"), "--out", str(tmp_path / "out")])
    assert "tokens" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "out").encode(prompt) == built.encode(prompt).ids


def test_held_out_tasks_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym_env.tasks.builtin.build_tokenizer.TASKS_PER_LEVEL", {1: 500})
    read = set(corpus([]))
    for split in ("validation", "test"):
        assert not {"user\n" + task.instruction for task in BuiltinSuite(1).sample(split, 200, seed=0)} & read
