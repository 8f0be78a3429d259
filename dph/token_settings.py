"""What a model folder's settings say about single tokens: which are special, and which are added to the vocabulary.

The vocabulary itself stands in tokenizer.json or tokenizer.model (dph/tokenizer.py). Beside it a folder may name tokens
in tokenizer_config.json, special_tokens_map.json and added_tokens.json. Where they say something odd, that is an error:
a token that is not recognised in a prompt comes as a handful of others, and nobody would notice.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from dph.errors import UserError, read_json
from dph.text import no_unicode

NAMES = ["bos_token", "eos_token", "unk_token", "pad_token"]
FLAGS = ["special", "normalized", "single_word", "lstrip", "rstrip"]  # of an added token: how it is matched


class TokenSettings:
    """The tokens that a folder's settings name.

    Attributes:
        values: tokenizer_config.json over special_tokens_map.json, as they were read.
        named: bos_token, eos_token, unk_token, pad_token, those that are named.
        extra: further special tokens, without ids.
        given: tokens with the ids that added_tokens.json and added_tokens_decoder give them.

    Raises: UserError for what is no token, and where two tokens have one id or one token two.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, Any] = read_json(folder / "special_tokens_map.json", optional=True)
        self.values |= read_json(folder / "tokenizer_config.json", optional=True)
        self.named: dict[str, AddedToken] = {}
        for name in NAMES:
            if self.values.get(name) is not None:
                self.named[name] = _token(f"{folder}: {name}", self.values[name], special=True)
        self.extra = self._read_extra()
        self.given: dict[int, AddedToken] = {}
        self._ids: dict[str, int] = {}
        self._read_added_tokens()
        self._read_decoder()

    def special(self) -> list[AddedToken]:
        """All that are special by name."""
        return [*self.named.values(), *self.extra]

    def unwritten(self) -> list[AddedToken]:
        """unk_token and pad_token: nothing here writes them.

        Where the vocabulary lacks them they are not added to it, since the model may have no place for them.
        """
        return [self.named[name] for name in ("unk_token", "pad_token") if name in self.named]

    def _read_extra(self) -> list[AddedToken]:
        """additional_special_tokens, newer extra_special_tokens: a list, or an object of names and tokens."""
        key = "extra_special_tokens" if self.values.get("extra_special_tokens") else "additional_special_tokens"
        listed = self.values.get(key) or []
        if isinstance(listed, dict):
            listed = list(listed.values())
        if not isinstance(listed, list):
            raise UserError(f"{self.folder}: {key} is {_shown(listed)}; it should be a list of tokens")
        return [_token(f"{self.folder}: {key}[{i}]", each, special=True) for i, each in enumerate(listed)]

    def _read_added_tokens(self) -> None:
        """added_tokens.json: {text: id}."""
        path = self.folder / "added_tokens.json"
        special = {token.content for token in self.special()}
        for content, number in read_json(path, optional=True).items():
            token = _token(f"{path}: {content!r}", content, special=content in special)
            self._give(str(path), number, token)

    def _read_decoder(self) -> None:
        """tokenizer_config.json's added_tokens_decoder: {id: {content, special, lstrip, ...}}; it has the last word."""
        where = f"{self.folder / 'tokenizer_config.json'}: added_tokens_decoder"
        decoder = self.values.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise UserError(f"{where} is {_shown(decoder)}; it should be an object of ids and tokens")
        for key, spelled in decoder.items():
            number = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key
            self._give(where, number, _token(f"{where}[{key!r}]", spelled, special=False))

    def _give(self, where: str, number: Any, token: AddedToken) -> None:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10**9:
            raise UserError(f"{where}: {token.content!r} has the id {number!r}; it should be a whole number from 0")
        there = self.given.get(number, token).content
        if there != token.content:
            raise UserError(f"{where}: {token.content!r} and {there!r} have the same id {number}")
        elsewhere = self._ids.get(token.content, number)
        if elsewhere != number:
            raise UserError(f"{where}: {token.content!r} has two ids, {elsewhere} and {number}")
        self.given[number] = token
        self._ids[token.content] = number


def _token(where: str, spelled: Any, special: bool) -> AddedToken:
    """A token as the files spell it: its text, or an object of `content` and flags."""
    fields = {"content": spelled} if isinstance(spelled, str) else spelled
    content = fields.get("content") if isinstance(fields, dict) else None
    if not isinstance(content, str) or not content:
        raise UserError(f"{where} is {_shown(spelled)}; it should be a text, or an object with its content")
    if (wrong := no_unicode(content)) is not None:
        raise UserError(f"{where} {wrong}")
    flags = {"special": special} | {name: fields[name] for name in FLAGS if name in fields}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{where}: {name} is {_shown(flag)}; it should be true or false")
    return AddedToken(content, **flags)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
