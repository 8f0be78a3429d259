"""A checkpoint's own tokenizer: text to ids and back, and chats through the checkpoint's template.

Reads tokenizer.json through `tokenizers`, else tokenizer.model through sentencepiece, with the tokens that the folder's
other files add to either; the chat template; every end token that the folder's files name.

Simplified: around added tokens, sentencepiece encodes each part of a text by itself, with its own leading blank, as
Llama 2's authors did. Decoding is for people and graders: encode(decode(ids)) need not be ids, so a response is kept
as ids and never encoded.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from dph.chat_template import read_chat_template
from dph.errors import UserError, read_json
from dph.token_settings import TokenSettings

FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
FILES += ["chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt"]


class Tokenizer:
    """What load_tokenizer returns.

    Attributes:
        vocab_size: every id is below it; a model's vocabulary may be larger (padded).
        bos_id: the begin token, where there is one.
        end_ids: the tokens that end a response.
        special_ids: the tokens that are marks and no text.
        model_max_length: the positions that config.json says the model was made for, where it says so.
        chat_template: the template's source, where there is one.
    """

    def __init__(self, folder: Path, variables: Mapping[str, Any], today: date) -> None:
        self.folder = folder
        settings = TokenSettings(folder)
        self.backend = _backend(folder, settings)
        ids, names = self.backend.vocabulary, self.backend.names
        self.vocabulary = ids
        self.vocab_size = max(ids.values()) + 1
        self.special_ids = self.backend.special_ids
        self.bos_id = ids.get(names.get("bos_token", ""))
        begins = settings.values.get("add_bos_token", self.bos_id in self.backend.around)
        self.begin = [] if self.bos_id is None or not begins else [self.bos_id]  # where there is no template
        self.end_ids = _end_ids(folder, ids.get(names.get("eos_token", "")))
        self.model_max_length = _model_max_length(read_json(folder / "config.json", optional=True))
        self.template = read_chat_template(folder, settings.values.get("chat_template"), names, variables, today)
        self.chat_template = None if self.template is None else self.template.source

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are recognised in it, none are added."""
        return self.backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens and ids beyond the vocabulary left out."""
        return self.backend.decode([i for i in ids if i < self.vocab_size])

    def answer_text(self, ids: Sequence[int]) -> str:
        r"""What an answer says, as it is graded: its text before the first token that is none.

        That is the end token, another special one, or an id beyond the vocabulary. If they were left out instead,
        "\boxed{1<|im_start|>2}" would read as a box of 12, and an answer that goes on to write a further turn would be
        graded by that turn.
        """
        return self.backend.decode(list(takewhile(self._is_text, ids)))

    def _is_text(self, token: int) -> bool:
        return token < self.vocab_size and token not in self.special_ids and token not in self.end_ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation ({role, content}, ...) up to where the assistant's answer begins, at least one.

        The template writes the begin token where it wants one. Without a template: the contents, parted by blank
        lines, after the begin token if the tokenizer adds one. UserError: the template refuses the messages, fails, or
        writes nothing.
        """
        roles = [message.get("role") for message in messages]
        if self.template is None:
            ids = self.begin + self.encode("\n\n".join(message["content"] for message in messages))
        else:
            try:
                ids = self.encode(self.template.render(messages))
            except Exception as error:  # whatever a stranger's template raises
                raise UserError(f"{self.folder}: the chat template fails on roles {roles}: {error}") from None
        if not ids:
            raise UserError(f"{self.folder}: a chat of roles {roles} comes to no token; look at the chat template")
        return ids

    def content(self) -> str:
        """SHA-256 of what turns text into ids and back: the tokenizer's file, the vocabulary, the special tokens."""
        digest = hashlib.sha256(self.backend.file.read_bytes())
        digest.update(json.dumps([sorted(self.vocabulary.items()), sorted(self.special_ids)]).encode())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Copy the tokenizer's files (generation_config.json too) into another model folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (self.folder / name).is_file() and not self.folder.samefile(folder):
                shutil.copyfile(self.folder / name, Path(folder) / name)


def load_tokenizer(
    folder: str | Path, variables: Mapping[str, Any] | None = None, today: date | None = None
) -> Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: the model folder.
        variables: what the chat template is to know beside the messages, [data] template.
        today: the day that the chat template takes for today; by default it is.

    Raises: UserError where the tokenizer or its end tokens are missing, or a file is broken.
    """
    return Tokenizer(Path(folder), variables or {}, today or date.today())


def _end_ids(folder: Path, named: int | None) -> tuple[int, ...]:
    """The end token that the tokenizer names, and all that generation_config.json and config.json give."""
    ends: list[Any] = [named]
    for name in ("generation_config.json", "config.json"):
        given = read_json(folder / name, optional=True).get("eos_token_id")
        ends += given if isinstance(given, list) else [given]
    found = [end for end in ends if end is not None]
    if not found or not all(type(end) is int and end >= 0 for end in found):  # True is no id
        raise UserError(f"{folder}: end tokens are {ends}; give eos_token_id in generation_config.json")
    return tuple(sorted(set(found)))


def _model_max_length(config: dict[str, Any]) -> int | None:
    """max_position_embeddings; RoPE of the types linear and yarn stretches it by its factor."""
    length = config.get("max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(length, int) or not isinstance(rope, dict):
        return None
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if not isinstance(factor, int | float):
        return length
    if kind == "linear":
        return int(length * factor)
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int):
        return max(length, int(original * factor))
    return length


# ---- the two libraries -------------------------------------------------------------------------------------------


def _backend(folder: Path, settings: TokenSettings) -> "_Json | _SentencePiece":
    if (folder / "tokenizer.json").is_file():
        return _Json(folder / "tokenizer.json", settings)
    if (folder / "tokenizer.model").is_file():
        return _SentencePiece(folder / "tokenizer.model", settings)
    if (folder / "vocab.json").is_file():
        raise UserError(
            f"{folder}: holds vocab.json but no tokenizer.json; transformers makes it of vocab.json and merges.txt: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise UserError(f"{folder}: no tokenizer; it must hold tokenizer.json or tokenizer.model")


class _Json:
    """tokenizer.json, with the tokens that the other files add to it."""

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        self.file = path
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
            self.inner.no_truncation()  # the file may ask for both
            self.inner.no_padding()
            self.around: list[int] = self.inner.encode("", add_special_tokens=True).ids  # what it puts around a text
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises no narrower class, and its panics are no Exception
            raise UserError(f"{path}: not a tokenizer: {error}") from None
        self._add_given(path, settings)
        self._add_special(settings)
        self.names = {name: token.content for name, token in settings.named.items()}
        self.vocabulary: dict[str, int] = self.inner.get_vocab(with_added_tokens=True)
        self.special_ids = {i for i, token in self.inner.get_added_tokens_decoder().items() if token.special}

    def _add_given(self, path: Path, settings: TokenSettings) -> None:
        """Adds the tokens with ids. The library numbers new ones itself, one after another; that must fit the ids."""
        known = self.inner.get_added_tokens_decoder()
        missing = [(i, token) for i, token in sorted(settings.given.items()) if repr(known.get(i)) != repr(token)]
        self.inner.add_tokens([token for _, token in missing])
        for number, token in missing:
            got = self.inner.token_to_id(token.content)
            if got != number:
                raise _unfit(path, token.content, number, got)

    def _add_special(self, settings: TokenSettings) -> None:
        """Makes special what the settings name so; a token that the vocabulary lacks gets the id after its last."""
        known = {token.content: token.special for token in self.inner.get_added_tokens_decoder().values()}
        for token in settings.special():
            if self.inner.token_to_id(token.content) is None and token in settings.unwritten():
                continue
            if not known.get(token.content):
                self.inner.add_special_tokens([token])

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=True))


class _SentencePiece:
    """tokenizer.model, with the tokens that the other files add to it."""

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        self.file = path
        try:
            self.inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path}: not a sentencepiece model: {error}") from None
        pieces = {self.inner.id_to_piece(i): i for i in range(len(self.inner))}
        named = {"bos_token": self.inner.bos_id(), "eos_token": self.inner.eos_id()}
        self.names = {name: self.inner.id_to_piece(i) for name, i in named.items() if i >= 0}
        self.names |= {name: token.content for name, token in settings.named.items()}
        self.around = [self.inner.bos_id()]  # what Llama's puts around a text
        self.added = {piece: i for piece, i in pieces.items() if self.inner.is_control(i)}
        self.special_ids = set(self.added.values())
        for number, token in settings.given.items():
            if pieces.get(token.content, number) != number:
                raise _unfit(path, token.content, number, pieces[token.content])
            self.added[token.content] = number
            if token.special:
                self.special_ids.add(number)
        for token in settings.special():
            vocabulary = pieces | self.added
            if token.content in vocabulary or token not in settings.unwritten():
                number = vocabulary.get(token.content, max(vocabulary.values()) + 1)
                self.added[token.content] = number
                self.special_ids.add(number)
        self.vocabulary = pieces | self.added
        self.added_text = {i: text for text, i in self.added.items() if pieces.get(text) != i}
        self.pattern = self._pattern([*settings.given.values(), *settings.extra])

    def _pattern(self, tokens: list[tokenizers.AddedToken]) -> re.Pattern[str]:
        """Finds added tokens in a text, the longest first, with the blanks beside them that they are to take along."""
        left = {token.content for token in tokens if token.lstrip}
        right = {token.content for token in tokens if token.rstrip}
        alternatives = []
        for text in sorted(self.added, key=len, reverse=True):
            before = r"\s*" if text in left else ""
            after = r"\s*" if text in right else ""
            alternatives.append(f"{before}({re.escape(text)}){after}")
        return re.compile("|".join(alternatives) or "(?!)")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self.pattern.finditer(text):
            ids += self.inner.encode(text[start : match.start()])
            ids.append(self.added[match[match.lastindex or 0]])
            start = match.end()
        return ids + list(self.inner.encode(text[start:]))

    def decode(self, ids: list[int]) -> str:
        text = ""
        kept = [i for i in ids if i not in self.special_ids]
        for added, group in groupby(kept, key=lambda i: i in self.added_text):
            run = list(group)
            text += "".join(self.added_text[i] for i in run) if added else self.inner.decode(run)
        return text


def _unfit(path: Path, token: str, given: int, found: int | None) -> UserError:
    where = f"{path.parent}: the added token {token!r}"
    return UserError(f"{where} has the id {given} in the folder's settings, but {found} by {path.name}")
