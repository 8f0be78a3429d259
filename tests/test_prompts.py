"""Prompts as a model reads them: what is too long for its positions is counted and said."""

from pathlib import Path

import pytest

from dph.config import load_config
from dph.prompts import tokenize
from dph.tasks.base import Prompt, Task
from dph.tasks.miniature_world import vocabulary
from dph.tokenizer import load_tokenizer
from tests.helpers import tiny_folder

POSITIONS = 256  # the tiny model's
WORDS = (2, 19, 249)  # of each prompt; the template puts the begin token before them


def words() -> Task:
    word = vocabulary()[0]
    chats = [{"role": "user", "content": " ".join([word] * count)} for count in WORDS]
    return Task("words", [Prompt(index, (chat,), "", {}) for index, chat in enumerate(chats)])


@pytest.mark.parametrize(("new_tokens", "beyond"), [(6, 0), (7, 1), (236, 1), (237, 2), (254, 3)])
def test_prompts_that_leave_too_few_positions_for_an_answer_are_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], new_tokens: int, beyond: int
) -> None:
    tokenizer = load_tokenizer(tiny_folder(tmp_path))
    data = tokenize(words(), tokenizer, load_config(None, [f"--sampling.max_new_tokens={new_tokens}"]))
    assert [len(prompt.tokens) for prompt in data.prompts] == [count + 1 for count in WORDS]
    said = capsys.readouterr().out
    assert said.count("\n") == (beyond > 0)
    if beyond:
        assert f"words: {beyond} of 3 prompts may get answers beyond the {POSITIONS} positions" in said
        assert f"sampling.max_new_tokens = {new_tokens}" in said


def test_a_model_that_names_no_positions_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "config.json").unlink()
    tokenize(words(), load_tokenizer(folder), load_config(None, ["--sampling.max_new_tokens=100000"]))
    assert capsys.readouterr().out == ""
