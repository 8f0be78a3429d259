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
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import sentencepiece
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dph.errors import UserError, read_json

FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
FILES += ["chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt"]
NAMES = ["bos_token", "eos_token", "unk_token", "pad_token"]


class Tokenizer:
    """What load_tokenizer returns. `chat_template` is its source, where there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = read_json(folder / "special_tokens_map.json", optional=True)
        settings |= read_json(folder / "tokenizer_config.json", optional=True)
        special = {name: t if isinstance(t, str) else t["content"] for name in NAMES if (t := settings.get(name))}
        self.backend: _Json | _SentencePiece
        if (folder / "tokenizer.json").is_file():
            self.backend = _Json(folder / "tokenizer.json", special)
        elif (folder / "tokenizer.model").is_file():
            self.backend = _SentencePiece(folder / "tokenizer.model", special, settings)
        else:
            raise UserError(f"{folder}: no tokenizer; it must hold tokenizer.json or tokenizer.model")
        ids, special = self.backend.vocabulary, self.backend.special
        self.vocabulary = ids
        self.vocab_size = max(ids.values()) + 1  # every id is below it; a model's vocabulary may be larger (padded)
        self.bos_id = ids.get(special.get("bos_token", ""))  # the begin token, where there is one
        begins = settings.get("add_bos_token", self.bos_id in self.backend.around)  # where there is no template
        self.begin = [] if self.bos_id is None or not begins else [self.bos_id]
        ends = [ids.get(special.get("eos_token", ""))]
        for name in ("generation_config.json", "config.json"):
            given = read_json(folder / name, optional=True).get("eos_token_id")
            ends += given if isinstance(given, list) else [given]
        found = {end for end in ends if end is not None}
        if not found or not all(isinstance(end, int) for end in found):
            raise UserError(f"{folder}: end tokens are {ends}; give eos_token_id in generation_config.json")
        self.end_ids = tuple(sorted(found))  # the tokens that end a response
        self.chat_template, self.template = _read_template(folder, settings.get("chat_template"), special)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are recognised in it, none are added."""
        return self.backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens and ids beyond the vocabulary left out."""
        return self.backend.decode([i for i in ids if i < self.vocab_size])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation ({role, content}, ...) up to where the assistant's answer begins.

        The template writes the begin token where it wants one. Without a template: the contents, parted by blank
        lines, after the begin token if the tokenizer adds one. UserError: the template refuses the messages or fails.
        """
        if self.template is None:
            return self.begin + self.encode("\n\n".join(message["content"] for message in messages))
        try:
            return self.encode(self.template.render(messages=list(messages)))
        except Exception as error:  # whatever a stranger's template raises
            roles = [message.get("role") for message in messages]
            raise UserError(f"{self.folder}: the chat template fails on roles {roles}: {error}") from None

    def save(self, folder: str | Path) -> None:
        """Copy the tokenizer's files (generation_config.json too) into another model folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (self.folder / name).is_file() and not self.folder.samefile(folder):
                shutil.copyfile(self.folder / name, Path(folder) / name)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder. UserError: it or its end tokens are missing, or a file is broken."""
    return Tokenizer(Path(folder))


class _Json:
    """tokenizer.json."""

    def __init__(self, path: Path, special: dict[str, str]) -> None:
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"{path}: not a tokenizer: {error}") from None
        self.inner.no_truncation()  # the file may ask for both
        self.inner.no_padding()
        self.special = special
        self.inner.add_special_tokens([t for t in special.values() if self.inner.token_to_id(t) is not None])
        self.vocabulary: dict[str, int] = self.inner.get_vocab(with_added_tokens=True)
        self.around: list[int] = self.inner.encode("", add_special_tokens=True).ids  # what it puts around a text

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=True))


class _SentencePiece:
    """tokenizer.model, with the tokens that added_tokens.json and tokenizer_config.json add to it."""

    def __init__(self, path: Path, special: dict[str, str], settings: dict[str, Any]) -> None:
        try:
            self.inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path}: not a sentencepiece model: {error}") from None
        pieces = {self.inner.id_to_piece(i): i for i in range(len(self.inner))}
        own = {"bos_token": self.inner.bos_id(), "eos_token": self.inner.eos_id()}
        self.special = {name: self.inner.id_to_piece(i) for name, i in own.items() if i >= 0} | special
        listed = settings.get("added_tokens_decoder") or {}
        self.skipped = {int(i) for i, token in listed.items() if token.get("special")}
        self.added = read_json(path.parent / "added_tokens.json", optional=True)
        self.added |= {token["content"]: int(i) for i, token in listed.items()}
        self.added_text = {i: token for token, i in self.added.items() if i >= len(pieces)}
        self.added |= {piece: i for piece, i in pieces.items() if self.inner.is_control(i)}
        self.vocabulary = pieces | self.added
        self.around = [self.inner.bos_id()]  # what Llama's puts around a text
        longest_first = sorted(self.added, key=len, reverse=True)
        self.split = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")").split

    def encode(self, text: str) -> list[int]:
        parts = ([self.added[part]] if part in self.added else self.inner.encode(part) for part in self.split(text))
        return [i for part in parts for i in part]

    def decode(self, ids: list[int]) -> str:
        kept = (i for i in ids if i not in self.skipped)
        runs = ((new, list(run)) for new, run in groupby(kept, key=lambda i: i in self.added_text))
        return "".join("".join(self.added_text[i] for i in run) if new else self.inner.decode(run) for new, run in runs)


def _read_template(folder: Path, source: Any, special: dict[str, str]) -> tuple[str | None, jinja2.Template | None]:
    """Source and compiled form of the chat template, with the rules and functions that it is written for."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    path = folder / "tokenizer_config.json"
    if (own := folder / "chat_template.jinja").is_file():
        path, source = own, own.read_text(encoding="utf-8")
    if source is None:
        return None, None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # unlike jinja's own it escapes no HTML
    environment.globals |= {"add_generation_prompt": True, "tools": None, "documents": None, **special}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        if isinstance(source, list):
            source = {template["name"]: template["template"] for template in source}["default"]
        return source, environment.from_string(source)
    except (jinja2.TemplateError, KeyError, TypeError) as error:
        raise UserError(f"{path}: broken chat template: {error!r}") from None
