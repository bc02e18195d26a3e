"""Builds the small tokenizer that the quickstart's policy uses.

A policy of two million parameters learns to fill slots only if a slot is one token, and a long harness prompt is cheap
only if the vocabulary knows it. So a byte-level BPE is trained on the suite's own train-split text and on the prompts
that a harness sends. Invariant: any text survives encoding and decoding, digits are one token each, and text of the
validation and test splits is never read.

    python -m clawgym_env.tasks.builtin.build_tokenizer PROMPTS.txt --out FOLDER

``PROMPTS.txt`` holds rendered harness prompts, chat markup included; it is read for its words and not stored.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.tasks.builtin import words
from clawgym_env.tasks.builtin.demonstrator import demonstrate
from clawgym_env.tasks.builtin.suite import BuiltinSuite

#: ChatML and tool markup, in the order of their ids.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>", "<tools>", "</tools>",
)  # fmt: skip
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"
VOCABULARY_SIZE = 2048
#: Train-split tasks read of each level.
TASKS_PER_LEVEL = {1: 3000, 2: 300, 3: 300}
#: How often each prompt, and each slot word in each of its contexts, is read.
PROMPT_WEIGHT, WORD_WEIGHT = 40, 200
#: What the harness's bash tool answers where a command prints nothing or fails.
TOOL_OUTPUTS = (
    "(no output)", "(no output)\n\nCommand exited with code 1", "No such file or directory", "Is a directory",
    "command not found", "Successfully wrote to", "Successfully replaced 1 block(s) in",
)  # fmt: skip

#: Pieces that no token crosses: a word with the blank before it, one digit, or all that stands between such (so that
#: JSON punctuation like ``": "`` can be one token).
PIECES = r" ?\p{L}+|\p{N}|[^\p{L}\p{N}]+?(?= ?\p{L}|\p{N}|\z)"

_SPECIAL = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))


def slot_words() -> tuple[str, ...]:
    """Every word that a level-1 slot can hold."""
    sets = (
        words.TABLES, tuple(words.COLUMNS), words.LOGS, words.LOG_LEVELS, words.CONFIGS, words.KEYS, words.VALUES,
        words.EXTENSIONS, words.FOLDERS, words.SCRIPTS, words.WRONG_STEMS, words.TEXTS, words.COUNTED,
    )  # fmt: skip
    return tuple(dict.fromkeys(word for each in sets for word in each))


def tool_call_text(command: str) -> str:
    """What stands between the tool-call tokens when ``command`` is called."""
    return '\n{"name": "bash", "arguments": ' + json.dumps({"command": command}, ensure_ascii=False) + "}\n"


def corpus(prompts: Sequence[str]) -> Iterator[str]:
    """Training text: harness prompts, slot words, and demonstrations of the train split."""
    for prompt in prompts:
        yield from _SPECIAL.split(prompt) * PROMPT_WEIGHT
    for word in slot_words():
        yield from (word, f" {word}", f'"{word}"', f"*.{word}") * WORD_WEIGHT
    for level, count in TASKS_PER_LEVEL.items():
        for index, task in enumerate(BuiltinSuite(level).sample("train", count, seed=0)):
            shown = demonstrate(task, seed=index, skill=0.6)
            yield from ("user\n" + task.instruction, "assistant\n", shown.final_text)
            yield from (tool_call_text(command) for command in shown.tool_commands)
            yield "\n" + TOOL_OUTPUTS[0] + "\n"
            if index % 10 == 0:
                yield from TOOL_OUTPUTS
                yield from (data.decode(errors="ignore") for data in task.files.values())


def build(prompts: Sequence[str], size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Trains the tokenizer.

    Args:
        prompts: Rendered harness prompts.
        size: Number of entries, special tokens and the 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(prompts), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and the configuration that ``transformers.AutoTokenizer`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 40960,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: reads the prompts, trains, writes, and says how long each prompt became."""
    parser = argparse.ArgumentParser(prog="build_tokenizer", description="Build the small tokenizer.")
    parser.add_argument("prompts", type=Path, nargs="+", help="text files, one rendered harness prompt each")
    parser.add_argument(
        "--out", type=Path, default=SHIPPED_TOKENIZER, help="folder to write (default: the shipped one)"
    )
    options = parser.parse_args(arguments)
    prompts = [path.read_text() for path in options.prompts]
    tokenizer = build(prompts)
    save(tokenizer, options.out)
    for path, prompt in zip(options.prompts, prompts, strict=True):
        print(f"{path}: {len(prompt)} characters, {len(tokenizer.encode(prompt).ids)} tokens")


if __name__ == "__main__":
    main()
