"""Reading and checking a config's values: TOML files, the command line, types and bounds, errors that name the key."""

import contextlib
import dataclasses
import difflib
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from dph.errors import UserError
from dph.text import damage

_NUMBERS = re.compile(r"[\d\s.,eE+\-\[\]]+")  # one, or a list of them
GONE = {  # keys of earlier versions, with what the error says of them
    "presample.top_k": "is now called presample.stored_top_k",
    "loss.overlong_buffer": "is now called train.overlong_buffer",
    "loss.level": "is gone: u is each token's, since that of a whole answer has a gradient without bound",
}


def key(default: Any, meaning: str, *choices: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """A dataclass field with its meaning (for --help), its choices and its bounds (low <= value <= high)."""
    metadata = {"meaning": meaning, "choices": choices, "low": low, "high": high}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def read_tables(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, dict[str, Any]]:
    """The file's sections over those of the file that it extends."""
    if path in seen:
        raise UserError(f"{path}: extends itself through {' -> '.join(map(str, seen))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except (ValueError, RecursionError) as error:  # also a number too long, brackets too deep
        raise UserError(f"{path}: not valid TOML: {error}") from None
    base = table.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{path}: extends = {base!r} should be the name of a file")
    tables = read_tables(path.parent / base, (*seen, path)) if base is not None else {}
    for name, section in table.items():
        if not isinstance(section, dict):
            raise UserError(f"{path}: {name} stands outside a section; write it under [section]")
        tables.setdefault(name, {}).update(section)
    return tables


def split_override(argument: str) -> tuple[str, str, str]:
    """('--loss.eta=0.2') -> ('loss', 'eta', '0.2')."""
    name, equals, text = argument.removeprefix("--").partition("=")
    section, dot, option = name.partition(".")
    if not (argument.startswith("--") and equals and dot and section and option):
        raise UserError(f"argument {argument!r} should read --section.key=value (see --help)")
    return section, option, text


def parse_override(text: str, hint: Any) -> Any:
    """A value of the command line: TOML, or a number as people write it, .5 or 5.; a bare word is a text.

    For a key that is a text all but a quoted one is taken as it stands: run.name=1.10 is no number.
    """
    value: Any = text
    with contextlib.suppress(ValueError, RecursionError):
        value = tomllib.loads(f"value = {text}")["value"]
    if hint is str:
        return value if isinstance(value, str) else text
    if value is text and _NUMBERS.fullmatch(text):
        digits_before = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
        with contextlib.suppress(ValueError):
            value = tomllib.loads("value = " + re.sub(r"(?<=\d)\.(?!\d)", ".0", digits_before))["value"]
    return value


def checked_section(kind: Any, section: str, values: Mapping[str, Any]) -> Any:
    """One section's dataclass, made of fields by `key`, from its table; every value is checked."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    checked = {}
    for name, value in values.items():
        if (answer := GONE.get(f"{section}.{name}")) is not None:
            raise UserError(f"{section}.{name} {answer}")
        if name not in fields:
            raise UserError(f"unknown key {section}.{name}{nearest(name, fields)}")
        checked[name] = _value(f"{section}.{name}", value, hints[name], fields[name].metadata)
    return kind(**checked)


def _value(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """`value` as the type `hint`, within its limits; a UserError that names the key otherwise."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            value = [value]
        return tuple(_value(f"{name}[{i}]", item, typing.get_args(hint)[0], limits) for i, item in enumerate(value))
    if origin is dict:
        return _table(name, value, typing.get_args(hint)[1])
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{name} has {len(str(abs(value)))} digits; it should be below 2^63")
    if isinstance(value, str) and (wrong := damage(value)) is not None:
        raise UserError(f"{name} {wrong}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if type(value) is not hint:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise UserError(f"{name} = {value!r} should be {kinds[hint]}")
    if limits["choices"] and value not in limits["choices"]:
        raise UserError(f"{name} = {value!r} should be one of {', '.join(limits['choices'])}")
    low, high = limits["low"], limits["high"]
    if isinstance(value, int | float) and not (low <= value <= high and math.isfinite(value)):
        bounds = f"from {low:.7g} to {high:.7g}" if math.isfinite(high) else f"at least {low:g} and finite"
        raise UserError(f"{name} = {value!r} should be {bounds}")
    return value


def _table(name: str, value: Any, hint: Any) -> dict[str, Any]:
    """`value` as a table whose values are of the type `hint`, or of one of its types."""
    kinds = typing.get_args(hint) or (hint,)
    if not isinstance(value, dict) or not all(type(each) in kinds for each in value.values()):
        right = 'strings, e.g. {prompt = "question"}'
        if kinds != (str,):
            right = "texts, true or false, and numbers, e.g. {enable_thinking = false}"
        raise UserError(f"{name} = {value!r} should be a table of {right}")
    for each, inner in value.items():
        for text in (each, inner):
            if isinstance(text, str) and (wrong := damage(text)) is not None:
                raise UserError(f"{name}.{each!r} {wrong}")
        if isinstance(inner, int | float) and not math.isfinite(inner):
            raise UserError(f"{name}.{each} = {inner!r} should be a number")
    return dict(value)


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """The end of an error's line about an unknown name: the one that was meant, or all there are."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
