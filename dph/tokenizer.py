"""A checkpoint's own tokenizer: text to ids and back, and chats through the checkpoint's template.

Reads tokenizer.json through `tokenizers`, else tokenizer.model through sentencepiece; the chat template from
chat_template.jinja or tokenizer_config.json; every end token that the folder's files name.

Simplified: no tools or documents in chats; of several templates only the one named "default". Around special tokens,
sentencepiece encodes each part of a text by itself, with its own leading blank, as Llama 2's authors did.
Decoding is for people and graders: encode(decode(ids)) need not be ids, so a response is kept as ids and never encoded.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import sentencepiece
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dph.errors import UserError

FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
FILES += ["chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt"]


class Tokenizer:
    """What load_tokenizer returns.

    Attributes:
        vocab_size: every id is below it; a model's vocabulary may be larger (padded).
        bos_id: the begin token, where there is one.
        end_ids: the tokens that end a response, ascending.
        chat_template: its source, where there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self.special = {name: _content(token) for name, token in tokens.items() if token}
        self.backend: _Json | _SentencePiece
        if (folder / "tokenizer.json").is_file():
            self.backend = _Json(folder / "tokenizer.json", list(self.special.values()))
        elif (folder / "tokenizer.model").is_file():
            self.backend = _SentencePiece(folder / "tokenizer.model", settings)
            self.special = self.backend.own_tokens() | self.special
        else:
            raise UserError(f"{folder}: no tokenizer; it must hold tokenizer.json or tokenizer.model")
        self.vocab_size = self.backend.size
        self.bos_id = self.backend.id_of(self.special.get("bos_token"))
        self.adds_bos = self.bos_id is not None and settings.get("add_bos_token", self.backend.adds(self.bos_id))
        self.end_ids = self._find_end_ids()
        self.chat_template, self._template = _find_template(folder, settings)

    def _find_end_ids(self) -> tuple[int, ...]:
        found = [self.backend.id_of(self.special.get("eos_token"))]
        for name in ("generation_config.json", "config.json"):
            ends = _read_json(self.folder / name).get("eos_token_id")
            found += ends if isinstance(ends, list) else [ends]
        end_ids = {end for end in found if end is not None}
        if not end_ids or not all(isinstance(end, int) for end in end_ids):
            raise UserError(f"{self.folder}: end tokens are {found}; give eos_token_id in generation_config.json")
        return tuple(sorted(end_ids))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are recognised in it, none are added."""
        return self.backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens and ids beyond the vocabulary left out."""
        return self.backend.decode([i for i in ids if i < self.vocab_size])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation ({role, content}, ...) up to where the assistant's answer begins.

        The template writes the begin token where it wants one. Without a template: the contents, parted by blank
        lines, after the begin token if the tokenizer adds one.

        Raises:
            UserError: the template refuses the messages or fails.
        """
        if self._template is None:
            begin = [self.bos_id] if self.bos_id is not None and self.adds_bos else []
            return begin + self.encode("\n\n".join(message["content"] for message in messages))
        try:
            asked = {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
            text = self._template.render(**asked, tools=None, documents=None, **self.special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            raise UserError(f"{self.folder}: the chat template fails on roles {roles}: {error}") from None
        return self.encode(text)

    def save(self, folder: str | Path) -> None:
        """Copy the tokenizer's files (generation_config.json too) into another model folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (self.folder / name).is_file() and not folder.samefile(self.folder):
                shutil.copyfile(self.folder / name, folder / name)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        UserError: the folder, its tokenizer or its end tokens are missing, or a file is broken; the message names it.
    """
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such model folder")
    return Tokenizer(Path(folder))


class _Json:
    """tokenizer.json."""

    def __init__(self, path: Path, special: list[str]) -> None:
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"{path}: not a tokenizer: {error}") from None
        self.inner.no_truncation()  # the file may ask for both
        self.inner.no_padding()
        self.inner.add_special_tokens([token for token in special if self.inner.token_to_id(token) is not None])
        self.size = max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=True))

    def id_of(self, token: str | None) -> int | None:
        return None if token is None else self.inner.token_to_id(token)

    def adds(self, token_id: int) -> bool:
        """Whether the post-processor puts this token around a text."""
        return token_id in self.inner.encode("", add_special_tokens=True).ids


class _SentencePiece:
    """tokenizer.model, with the tokens that added_tokens.json and tokenizer_config.json add to it."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        try:
            self.inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path}: not a sentencepiece model: {error}") from None
        pieces = len(self.inner)
        self.added = {token: int(i) for token, i in _read_json(path.parent / "added_tokens.json").items()}
        self.skipped: set[int] = set()
        for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
            self.added[_content(token)] = int(token_id)
            self.skipped |= {int(token_id)} if token.get("special") else set()
        self.added |= {self.inner.id_to_piece(i): i for i in range(pieces) if self.inner.is_control(i)}
        self.added_text = {i: token for token, i in self.added.items() if i >= pieces}
        self.size = max([pieces, *(i + 1 for i in self.added_text)])
        longest_first = sorted(self.added, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self.added else None

    def own_tokens(self) -> dict[str, str]:
        ids = {"bos_token": self.inner.bos_id(), "eos_token": self.inner.eos_id()}
        return {name: self.inner.id_to_piece(i) for name, i in ids.items() if i >= 0}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.split.split(text) if self.split else [text]:
            ids += [self.added[part]] if part in self.added else self.inner.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        kept = (i for i in ids if i not in self.skipped)
        runs = groupby(kept, key=lambda i: i in self.added_text)
        return "".join(
            "".join(self.added_text[i] for i in run) if added else self.inner.decode(list(run)) for added, run in runs
        )

    def id_of(self, token: str | None) -> int | None:
        if token in self.added or token is None:
            return self.added[token] if token else None
        piece = int(self.inner.piece_to_id(token))  # the unknown piece's id where there is no such token
        return piece if self.inner.id_to_piece(piece) == token else None

    def adds(self, token_id: int) -> bool:
        """Llama's default; tokenizer_config.json may say otherwise."""
        return token_id == self.inner.bos_id()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words in some templates; for us it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The functions and whitespace rules that templates are written for (transformers')."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:  # unlike jinja's own it escapes no HTML
        return json.dumps(value, **({"ensure_ascii": False} | options))

    extensions = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _find_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, jinja2.Template | None]:
    """Source and compiled form of the chat template, both None where the folder has none."""
    path, source = folder / "tokenizer_config.json", settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):
        source = {template.get("name"): template.get("template") for template in source}.get("default")
        if source is None:
            raise UserError(f"{path}: of several chat templates one must be named 'default'")
    if source is None:
        return None, None
    try:
        return source, _environment().from_string(source)
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"{path}: broken chat template: {error}") from None


def _content(token: str | Mapping[str, Any]) -> str:
    """A token's text: files spell it as a string or as {content, special, ...}."""
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; it must be an object")
    return data
