"""The second study's tasks: what each grader takes and refuses, splits, sources, and the table of candidates."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dph.config import DataConfig
from dph.errors import UserError
from dph.tasks import Reward, Task, load_task
from dph.tasks.base import Prompt, Row
from study import candidates
from study import families as f
from study.plan import load_study, make_run, pick
from study.skills import FAMILIES, SPLITS, Skills, questions_of, split_of
from study.words import CATEGORIES, singular
from tests.helpers import tiny_folder

ROOT = Path(__file__).parent.parent
SOURCE = f"task:{ROOT / 'study' / 'skills.py'}"
FROM_FILES = ("svamp", "multiarith")  # their questions lie in data/, which is not here
MADE = [name for name in FAMILIES if name not in FROM_FILES]

ANIMAL = {"accepted": ["cat", "cow"], "refused": ["dog"]}
CASES: list[tuple[Callable[[Any, str], Reward], Any, str, str]] = [
    (f.last_number, 7, "7", "right"),
    (f.last_number, 7, "3 + 4 = 7", "right"),
    (f.last_number, 7, "The answer is 7.", "right"),
    (f.last_number, -2, "3 - 5 = -2", "right"),
    (f.last_number, 7, "7 or 8", "wrong"),
    (f.last_number, 7, "7.5", "wrong"),
    (f.last_number, 7, "17", "wrong"),
    (f.last_number, 1325, "53 * 25 = 1,325", "right"),
    (f.last_number, 4, "9-5=4", "right"),
    (f.last_number, 7, "no idea", "no_answer"),
    (f.calculation, {"sign": "+", "result": 9}, "2 + 7", "right"),
    (f.calculation, {"sign": "+", "result": 9}, "4+5 = 9", "right"),
    (f.calculation, {"sign": "*", "result": 9}, "3 × 3", "right"),
    (f.calculation, {"sign": "+", "result": 9}, "2 + 7 = 10", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "2 + 8", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "2 + 7, 3 + 6", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "9", "no_answer"),
    (f.calculation, {"sign": "-", "result": 6}, "14 − 8 = 6.", "right"),
    (f.calculation, {"sign": "-", "result": 6}, "-14 - 8", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "4.5 + 4.5", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "1.4 + 5", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "4 + 5 + 1", "wrong"),
    (f.calculation, {"sign": "+", "result": 9}, "4 + 5 = -9", "wrong"),
    (f.one_number, {"low": 21, "high": 29, "step": 1, "said": [20, 30]}, "25 is between 20 and 30.", "right"),
    (f.one_number, {"low": 21, "high": 29, "step": 1, "said": [20, 30]}, "21, 22", "wrong"),
    (f.one_number, {"low": 21, "high": 29, "step": 1, "said": [20, 30]}, "31", "wrong"),
    (f.one_number, {"low": 21, "high": 29, "step": 2, "said": [20]}, "23", "wrong"),
    (f.one_number, {"low": 21, "high": 29, "step": 1, "said": [20, 30]}, "20", "no_answer"),
    (f.exactly, "river", "River.", "right"),
    (f.exactly, "river", "the river", "wrong"),
    (f.one_of, ["cold", "cool"], "The opposite of hot is cold.", "right"),
    (f.one_of, ["cold", "cool"], "cold is the opposite", "wrong"),
    (f.one_of, ["cold"], "well " * f.LONGEST_NAMING + "cold", "wrong"),
    (f.one_of, ["cold"], "...", "no_answer"),
    (f.member, ANIMAL, "A cat.", "right"),
    (f.member, ANIMAL, "The cat is a cat", "right"),
    (f.member, ANIMAL, "cat, cow", "wrong"),
    (f.member, ANIMAL, "a cat, not a dog", "wrong"),
    (f.member, ANIMAL, "cat" + " and" * f.LONGEST_NAMING, "wrong"),
    (f.member, ANIMAL, "category", "no_answer"),
    (f.member, ANIMAL, "Cats", "right"),
    (f.member, ANIMAL, "Dogs and a cat", "wrong"),
    (f.member, ANIMAL, "It is not a cat.", "wrong"),
    (f.member, {"accepted": ["plane/airplane", "car"], "refused": []}, "A plane is an airplane.", "right"),
    (f.member, {"accepted": ["car"], "refused": ["plane/airplane"]}, "Airplanes or a car", "wrong"),
    (f.member, {"accepted": ["cherry", "plum"], "refused": [], "lacks": "i"}, "A cherry.", "right"),
    (f.member, {"accepted": ["cherry", "plum"], "refused": [], "lacks": "i"}, "Cherries.", "wrong"),
    (f.spelled, "cat", "c-a-t", "right"),
    (f.spelled, "cat", "C A T", "right"),
    (f.spelled, "cat", "cat", "wrong"),
    (f.in_capitals, "green river", "GREEN RIVER", "right"),
    (f.in_capitals, "green river", "Green RIVER", "wrong"),
    (f.in_order, ["cat", "dog"], "cat, dog", "right"),
    (f.in_order, ["cat", "dog"], "dog, cat", "wrong"),
    (f.in_order, ["cat", "dog"], "cat, dog, fox", "wrong"),
    (f.so_many, 3, "It makes honey.", "right"),
    (f.so_many, 3, "It makes", "wrong"),
    (f.so_many, 3, "It makes\nhoney", "wrong"),
    (f.so_many, 3, "Bees fly 24 high.", "wrong"),
    (f.ungraded, "none", "Anything at all.", "wrong"),
]
SENTENCES = [
    ({"has": "river"}, "The river is old.", "right"),
    ({"has": "river"}, "The rivers are old.", "wrong"),
    ({"has": "river"}, "The river is old and", "wrong"),  # cut off
    ({"has": "river"}, "The river. It is old.", "wrong"),
    ({"has": "river"}, "The river\nis old.", "wrong"),
    ({"has": "river"}, "River.", "wrong"),
    ({"has": "river"}, "River river river.", "wrong"),
    ({"has": "river"}, "Write a short sentence with the word river.", "wrong"),  # the question itself
    ({"has": "river"}, "The river is old.It is.", "wrong"),
    ({"has": "river"}, "Is the river old?", "wrong"),
    ({"has": "river", "marks": "?"}, "Is the river old?", "right"),
    ({"last": "river"}, "We like the river.", "right"),
    ({"last": "river"}, "The river is old.", "wrong"),
    ({"has": "river"}, "", "no_answer"),
]


def opened(query: str, seed: int = 0, **data: Any) -> Task:
    return load_task(f"{SOURCE}?{query}", DataConfig(**data), seed, Path("runs"))


@pytest.mark.parametrize(("grade", "value", "text", "outcome"), CASES)
def test_graders_take_and_refuse(grade: Callable[[Any, str], Reward], value: Any, text: str, outcome: str) -> None:
    assert grade(value, text).outcome == outcome


@pytest.mark.parametrize(("rules", "text", "outcome"), SENTENCES)
def test_a_sentence_keeps_its_rules(rules: dict[str, Any], text: str, outcome: str) -> None:
    assert f.sentence({"marks": ".!", "least": 3, **rules}, text).outcome == outcome


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "open"])
def test_every_worked_example_is_right_by_its_familys_grader(name: str) -> None:
    value = {
        "sums1": 7, "differences1": 5, "products1": 12, "sums2": 55, "differences2": 34, "products2": 132, "svamp": 7,
        "multiarith": 11, "make_sum": {"sign": "+", "result": 9}, "make_difference": {"sign": "-", "result": 6},
        "make_product": {"sign": "*", "result": 6},
        "between": {"low": 201, "high": 209, "step": 1, "said": [200, 210]},
        "even_above": {"low": 201, "high": 999, "step": 2, "said": [200]},
        "name": {"accepted": ["europe", "asia"], "refused": []},
        "name_other": {"accepted": ["europe"], "refused": ["asia"]},
        "name_letter": {"accepted": ["europe"], "refused": ["asia"]},
        "name_without": {"accepted": ["asia"], "refused": ["europe"]},
        "rhyme": ["mill", "bill"], "opposite": ["peace"], "first_letter": "h", "last_letter": "y", "spell": "honey",
        "backwards": "yenoh", "last_word": "tower", "count_words": 3, "sort_words": ["field", "honey", "tower"],
        "copy": "sweet honey", "capitals": "sweet honey", "so_many_words": 3,
        "sentence_with": {"marks": ".!", "least": 3, "has": "honey"},
        "sentence_end": {"marks": ".!", "least": 3, "last": "honey"},
        "question_with": {"marks": "?", "least": 3, "has": "honey"},
    }[name]  # fmt: skip
    for _, answer in FAMILIES[name].shots:
        assert FAMILIES[name].grade(value, answer).outcome == "right", answer


@pytest.mark.parametrize("name", MADE)
def test_splits_share_no_question_and_no_worked_example(name: str) -> None:
    texts = {split: {q.text for q in questions_of(name, split)} for split in SPLITS}
    assert sum(map(len, texts.values())) == len(set().union(*texts.values())), "no text stands in two splits"
    assert all(texts.values())
    everything = {q.text for q in FAMILIES[name].questions()}
    examples = {question for question, _ in FAMILIES[name].shots}
    assert set().union(*texts.values()) == everything - examples


def test_no_word_stands_twice_in_a_list() -> None:
    for category, entries in CATEGORIES.items():
        names = [singular(name) for entry in entries for name in entry.split("/")]
        assert len(names) == len(set(names)), category


@pytest.mark.parametrize(
    ("one", "many"),
    [("cherry", "cherries"), ("tomato", "tomatoes"), ("peach", "peaches"), ("brass", "brass"), ("tennis", "tennis"),
     ("bus", "bus"), ("eye", "eyes")],
)  # fmt: skip
def test_a_plural_is_the_same_word(one: str, many: str) -> None:
    assert singular(one) == singular(many)


def test_what_a_question_excludes_is_refused_under_all_its_names() -> None:
    asked = {q.text: q.value for name in ("name_other", "name_letter") for q in FAMILIES[name].questions()}
    assert f.member(asked["Name a color other than gray."], "Grey").outcome != "right"
    assert f.member(asked["Name a vehicle other than plane."], "An airplane").outcome != "right"
    assert f.member(asked["Name a vehicle that begins with A."], "An airplane").outcome == "right"
    assert f.member(asked["Name a vehicle that begins with A."], "A plane").outcome != "right"


def test_both_orders_of_a_sum_are_in_one_split() -> None:
    where = {q.text: split_of("sums2", q.about) for q in FAMILIES["sums2"].questions()}
    for text, split in where.items():
        a, b = re.findall(r"\d+", text)
        assert where[f"{b} + {a} ="] == split


@pytest.mark.parametrize("name", MADE)
def test_gold_answers_survive_json_and_are_graded_alike(name: str) -> None:
    for question in FAMILIES[name].questions()[:20]:
        back = json.loads(json.dumps(question.value))
        for text in ("a cat", "12", "5 + 7 = 12", "Is the river old?", question.about):
            assert FAMILIES[name].grade(back, text) == FAMILIES[name].grade(question.value, text)


def test_questions_of_one_text_have_one_answer() -> None:
    for name in MADE:
        found: dict[str, Any] = {}
        for question in FAMILIES[name].questions():
            assert found.setdefault(question.text, question.value) == question.value, question.text


def test_a_seed_chooses_always_the_same_questions() -> None:
    def asked(seed: int) -> list[str]:
        return [prompt.messages[-1]["content"] for prompt in opened("family=sums2+name_other&count=9", seed).prompts()]

    assert asked(3) == asked(3)
    assert asked(3) != asked(4)
    assert len(set(asked(3))) == 18


def test_a_family_may_have_a_count_of_its_own() -> None:
    skills = [prompt.meta["skill"] for prompt in opened("family=sums1:3+copy&count=2").prompts()]
    assert (skills.count("sums1"), skills.count("copy")) == (3, 2)


def test_worked_examples_are_earlier_turns_behind_the_system_message() -> None:
    prompt = opened("family=copy&count=1&shots=1", system="Be short.").prompts()[0]
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[2]["content"] == "sweet honey"
    assert [message["role"] for message in opened("family=copy&count=1").prompts()[0].messages] == ["user"]


def test_each_prompt_is_judged_by_its_own_family_also_when_it_was_stored() -> None:
    task = opened("family=sums1:1+copy:1")
    for prompt in task.prompts():
        name, value = prompt.gold
        right = str(value) if name == "sums1" else value
        assert task.reward(prompt, right).value == 1
        assert task.reward(prompt, right + " x 9").value == 0
        row = Row(Path("samples.jsonl"), 1, json.loads(json.dumps(task.record(prompt))))
        stored = load_task(SOURCE + "?family=copy&count=1", DataConfig(), 0, Path("runs"), [row])
        assert stored.reward(stored.prompts()[0], right).value == 1


def test_what_a_reward_depends_on_names_every_file_of_the_task() -> None:
    assert set(opened("family=copy&count=1").content()) == {"families.py", "words.py", "grader"}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("family=sum1", "family = 'sum1' should be some of sums1,"),
        ("split=train", "family = '' should be some of sums1,"),
        ("family=copy+copy", "names copy twice"),
        ("family=copy:0", "count = '0' should be a whole number from 1"),
        ("family=copy:", "count = '' should be a whole number from 1"),
        ("family=sums1&count=42", "count = 42 should be at most 41, all there are of sums1, train"),
        ("family=copy&split=dev", "split = 'dev' should be one of train, validation, test"),
        ("family=copy&shots=2", "shots = '2' should be a whole number from 0 to 1"),
        ("family=copy&colour=1", "unknown option 'colour'"),
    ],
)
def test_a_mistake_in_a_source_is_one_line(query: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        opened(query)


def test_word_problems_are_read_from_the_published_files(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"Body": "Ann has 3 pens.", "Question": "How many pens?", "Answer": 3.0}\n')
    assert f.svamp(path) == [f.Question("Ann has 3 pens. How many pens?", 3, "Ann has 3 pens. How many pens?")]
    path.write_text('{"input": "Ann had 3 pens and lost 1. How many?", "target": 2}\n')
    assert f.multiarith(path)[0].value == 2


def test_the_class_is_the_files_only_task() -> None:
    assert issubclass(Skills, Task)


# The study of them


def test_the_study_is_thirteen_settings_and_every_config_is_accepted() -> None:
    study = load_study(ROOT / "study" / "smollm2.toml")
    settings = pick(study, None)
    assert len(settings) == 13
    assert {name for name, _ in settings} == {"grpo", "dapo", "rkl", "dph_f", "dph_js", "replay", "adapters"}
    for setting in settings:
        run = make_run(study, setting, 2)
        assert (run.config.run.seed, run.config.run.threads) == (2, 1)
        assert run.config.train == replace(
            make_run(study, ("grpo", None), 2).config.train,
            dynamic_sampling=run.config.train.dynamic_sampling,
            overlong_buffer=run.config.train.overlong_buffer,
        )
        assert run.config.loss.penalises_rollouts == (setting[0] == "rkl")
        assert run.config.loss.uses_stored_answers == (setting[0] in ("dph_f", "dph_js", "replay"))


def test_every_set_of_the_study_opens_and_none_but_validation_and_in_domain_has_a_trained_family() -> None:
    study = load_study(ROOT / "study" / "smollm2.toml")
    run = make_run(study, ("grpo", None), 0)
    trained = {prompt.meta["skill"] for prompt in opened_by(run.config.data.train)}
    for name, each in study.sets.items():
        if each.source:
            skills = {prompt.meta["skill"] for prompt in opened_by(each.source)}
            assert (skills == trained) == (name in ("in_domain", "validation"))
            assert skills == trained or not skills & trained


def opened_by(source: str) -> list[Prompt]:
    """The prompts of a source as the toml names it, from wherever the tests run."""
    return load_task(source.replace("task:study/skills.py", SOURCE), DataConfig(), 0, Path("runs")).prompts()


def test_the_table_of_candidates_has_a_row_a_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_folder(tmp_path / "model")
    config = tmp_path / "small.toml"
    config.write_text("[sampling]\nmax_new_tokens = 3\n")
    given = [str(model), "--config", str(config), "--dtype", "fp32", "--families", "copy+sums1"]
    monkeypatch.setattr(sys, "argv", ["candidates", *given])
    candidates.main(*candidates.parse())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| family | group | pass@1 | pass@16 | 8 of 8 | some of 8 |")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| copy", "| sums1"]
    assert {line.count("|") for line in lines} == {10}


def test_a_candidate_that_is_no_family_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["candidates", str(tmp_path), "--families", "copies"])
    with pytest.raises(UserError, match="--families: 'copies' should be some of sums1,"):
        candidates.main(*candidates.parse())
