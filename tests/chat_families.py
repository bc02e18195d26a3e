"""Tokenizers for chat families other than our own: the shipped one with every token added that the family asks for."""

from __future__ import annotations

import re
from functools import cache

import renderers
from tokenizers import Tokenizer

from clawgym_env.rendering import ChatRenderer
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER, FastTokenizer

#: Every family of the library but those that run a template from the model's folder, and gpt-oss, which downloads.
FAMILIES = [
    "qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl", "nemotron-3", "nemotron-3-ultra",
    "nemotron-3.5", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3", "inkling", "kimi-k2", "kimi-k2.5",
    "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1", "llama-3", "minimax-m2", "deepseek-v3", "deepseek-r1",
    "deepseek-v4",
]  # fmt: skip
#: Families that write <|im_start|>.
CHATML = ["qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3-vl", "nemotron-3", "nemotron-3-ultra"]


@cache
def tokenizer_for(family: str) -> FastTokenizer:
    """The shipped tokenizer with what the library says is missing, until it says nothing."""
    tokenizer = Tokenizer.from_file(str(SHIPPED_TOKENIZER / "tokenizer.json"))
    for _ in range(100):
        named = FastTokenizer(tokenizer, name_or_path=family)
        try:
            renderers.create_renderer(named, renderers.config_from_name(family))
        except (AssertionError, ValueError, RuntimeError) as error:
            missing = re.search(r"'([^']+)'", str(error))
            assert missing is not None, error
            assert tokenizer.token_to_id(missing[1]) is None, error
            tokenizer.add_special_tokens([missing[1]])
        else:
            return named
    raise AssertionError(f"{family} asks for ever more tokens")


@cache
def renderer_for(family: str, *, enable_thinking: bool = False) -> ChatRenderer:
    """The family's renderer."""
    return ChatRenderer(tokenizer_for(family), family=family, enable_thinking=enable_thinking)
