r"""Backslashes that TOML and JSON have eaten are found; what people write with the same characters is taken."""

import json
import tomllib
from pathlib import Path

import pytest

from dph.config import load_config
from dph.errors import DataError, UserError
from dph.tasks.base import Row
from dph.text import damage

ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}  # of TOML and JSON
TEX = [
    *(r"\boxed{2}", r"\begin{cases}", r"\beta", r"\bar x", r"\binom{4}{2}", r"\frac{1}{2}", r"\forall x", r"\fbox{2}"),
    *(r"\right)", r"\rho", r"\text{yes}", r"x = 5\text{ cm}", r"5\times 3", r"\theta", r"a \tfrac{1}{2}", r"$\tan x$"),
    *(r"{\tiny x}", r"\textbf{2}", r"x \neq 3", r"\nabla f", r"x \notin A"),
]


@pytest.mark.parametrize("tex", TEX)
def test_an_eaten_backslash_is_found_whichever_reader_ate_it(tex: str) -> None:
    eaten = tex
    for letter, character in ESCAPES.items():
        eaten = eaten.replace(f"\\{letter}", character)
    assert eaten != tex
    wrong = damage(eaten)
    assert wrong is not None
    assert "single quotes in TOML" in wrong
    assert "doubled backslashes in JSON" in wrong
    assert "\n" not in wrong
    assert damage(tex) is None


def test_the_message_shows_the_character_and_what_follows_it() -> None:
    read = json.loads(r'"\frac{1}{2}"')
    assert damage(read) is not None
    assert "holds a form feed (U+000C) before 'rac{1}{2}'" in str(damage(read))
    read = tomllib.loads(r'x = "in \boxed{}"')["x"]
    assert "holds a backspace (U+0008) before 'oxed{}'" in str(damage(read))


@pytest.mark.parametrize("character", [chr(code) for code in (*range(9), 11, *range(14, 32), 127)])
def test_no_other_control_character_is_text(character: str) -> None:
    assert damage(f"a{character}b") is not None


@pytest.mark.parametrize(
    "text",
    [
        *("", "two\nlines\n", "\r\nWindows\r\n", "last\r", "a\tb\tan apple", "one,\ttwo", "if x:\n\treturn\n"),
        *("-\titem", "{\n\t}\t// end", "x =\t5"),
        *("eat\t 20 + 10\t= 30", "next line\neq. 3\nnext to\nutter", "|\ta\t|", "fünf 日本 \u2028 ☃", "C:\\temp"),
    ],
)
def test_what_people_write_is_taken(text: str) -> None:
    assert damage(text) is None


def test_a_config_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for key in ("instruction", "system"):
        path.write_text(f'[data]\n{key} = "Put it in \\boxed{{}}."\n')
        with pytest.raises(UserError, match=rf"^data\.{key} holds a backspace .*single quotes") as caught:
            load_config(path)
        assert "\n" not in str(caught.value)
    path.write_text("[data]\ninstruction = 'Put it in \\boxed{}.'\n")
    assert load_config(path).data.instruction == r"Put it in \boxed{}."


def test_a_row_names_its_place_and_field() -> None:
    row = Row(Path("x.jsonl"), 3, {"answer": "\frac{1}{2}"})
    with pytest.raises(DataError, match=r"x\.jsonl, line 3: answer holds a form feed"):
        row.text("answer")


def test_a_response_may_hold_what_a_model_writes() -> None:
    written = "\x0c\b\x00 \t"
    assert Row(Path("x.jsonl"), 1, {"response": written}).response() == written
    with pytest.raises(DataError, match="response holds half a surrogate pair"):
        Row(Path("x.jsonl"), 1, {"response": "\ud83d"}).response()
