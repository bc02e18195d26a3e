"""A tokenizer for the renderers without transformers or torch.

It wraps `tokenizers.Tokenizer` in the surface that ``renderers.base.OffsetTokenizer`` asks for. Invariant: encoding
adds no token of its own and decoding drops none, so ``decode(encode(text)) == text`` for a byte-level model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from clawgym_env.errors import ConfigError

#: Folder of the small tokenizer that comes with the package.
SHIPPED_TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"

#: Characters of the longest text whose ids are kept.
LONGEST_REMEMBERED = 64


def _scalar_text(text: str) -> str:
    """The text with lone surrogates replaced: JSON can carry them, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class FastTokenizer:
    """Token ids from text and back.

    Args:
        tokenizer: The model and its special tokens.
        name_or_path: Where it came from; renderers choose a template by it.
        eos_token: End-of-turn token, where known.
        pad_token: Padding token, where known.

    Attributes:
        eos_token_id: Id of ``eos_token``, or ``None``.
        pad_token_id: Id of ``pad_token``, or ``None``.
        unk_token_id: Id of the model's unknown token; ``None`` for byte-level models.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name_or_path: str = "",
        eos_token: str | None = None,
        pad_token: str | None = None,
    ):
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.eos_token = eos_token
        self.pad_token = pad_token
        unknown = getattr(tokenizer.model, "unk_token", None)
        self.eos_token_id = self._known_id(eos_token)
        self.pad_token_id = self._known_id(pad_token)
        self.unk_token_id = self._known_id(unknown)
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    def _known_id(self, token: str | None) -> int | None:
        if token is None:
            return None
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer {self.name_or_path!r} has no token {token!r}")
        return found

    def __len__(self) -> int:
        """Number of entries, special tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """Number of entries, special tokens included."""
        return len(self)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; markup that spells a special token becomes that token.

        Other threads run meanwhile.
        """
        # Of the library's calls, only those on batches let other threads run.
        (encoding,) = self._tokenizer.encode_batch_fast([_scalar_text(text)], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of one id or several; other keywords of transformers' ``decode`` have no effect here."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """Id of a token; `unk_token_id` where there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found

    def is_added(self, token_id: int) -> bool:
        """Whether a token stands outside of the model's own vocabulary, as the marks of a chat format do."""
        return token_id in self._added

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Id of a token, or the ids of several."""
        return self.token_to_id(tokens) if isinstance(tokens, str) else [self.token_to_id(token) for token in tokens]

    def __call__(
        self, text: str, *, add_special_tokens: bool = False, return_offsets_mapping: bool = False
    ) -> Mapping[str, Any]:
        """Token ids of a text under ``input_ids`` and, if asked, [start, end) characters under ``offset_mapping``."""
        encoding = self._tokenizer.encode(_scalar_text(text), add_special_tokens=add_special_tokens)
        out: dict[str, Any] = {"input_ids": list(encoding.ids)}
        if return_offsets_mapping:
            out["offset_mapping"] = list(encoding.offsets)
        return out

    def for_ids(self) -> FastTokenizer:
        """This tokenizer without character offsets, for callers that want ids alone: long texts take half the time."""
        return _WithoutOffsets(
            self._tokenizer, name_or_path=self.name_or_path, eos_token=self.eos_token, pad_token=self.pad_token
        )


class _WithoutOffsets(FastTokenizer):
    """All offsets are 0 (left out, renderers would look for them by decoding token by token); markup is remembered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remembered = lru_cache(maxsize=1024)(super().encode)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; templates encode the same few words at every turn."""
        if len(text) > LONGEST_REMEMBERED:
            return super().encode(text, add_special_tokens)
        return list(self._remembered(text, add_special_tokens))

    def __call__(
        self, text: str, *, add_special_tokens: bool = False, return_offsets_mapping: bool = False
    ) -> Mapping[str, Any]:
        """Token ids of a text under ``input_ids``."""
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}


def _token_text(setting: Any) -> str | None:
    """A token of ``tokenizer_config.json``: plain, or an object with its ``content``."""
    return setting.get("content") if isinstance(setting, Mapping) else setting


def load_tokenizer(path: Path | None = None) -> FastTokenizer:
    """Loads a tokenizer.

    Args:
        path: A ``tokenizer.json``, or a model folder that holds one; ``None`` for the small one of this package.

    Raises:
        ConfigError: there is no readable ``tokenizer.json``.
    """
    place = SHIPPED_TOKENIZER if path is None else Path(path)
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {file}: give a tokenizer.json or a model folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        settings_file = file.with_name("tokenizer_config.json")
        settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    except Exception as error:  # the Rust loader raises bare Exception
        raise ConfigError(f"{file} is no tokenizer: {error}") from error
    return FastTokenizer(
        tokenizer,
        name_or_path=str(file.parent),
        eos_token=_token_text(settings.get("eos_token")),
        pad_token=_token_text(settings.get("pad_token")),
    )
