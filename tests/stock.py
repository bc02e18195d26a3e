"""What stock TorchRL code needs beside our rows: a tokenizer that needs no download, and its LLM wrapper."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        chat_template=CHATML,
    )


def scorer(model: nn.Module) -> TransformersWrapper:
    """TorchRL's wrapper as a scorer of token rows."""
    return TransformersWrapper(
        model, tokenizer=byte_tokenizer(), input_mode="tokens", generate=False, return_log_probs=True, pad_output=False
    )
