r"""The math grader: which answer a response gives, what hostile answers cost, and data sets as they are published.

Which answers are right is tested in test_math_equality.py.

With $DPH_DATA set (the folder that holds gsm8k/, svamp/, multiarith/ and formats/), the published files are read too.
"""

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dph.config import DataConfig
from dph.errors import DataError
from dph.tasks import load_task
from dph.tasks.base import Prompt
from dph.tasks.math import MathTask, without_unit
from dph.tasks.math_equality import quick
from dph.tasks.math_extraction import extract

TOWER = r"\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}"


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_task(folder: Path, **settings_) -> MathTask:
    path = write(folder / "rows.jsonl", {"question": "How many?", "answer": "#### 1"})
    return MathTask(str(path), {}, DataConfig(**settings_))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("math"), grader_timeout=20.0, grader_workers=2)
    yield made
    made.close()


# ---- extraction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}, no: \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ \frac{1}{2}, \{3\} \right\}}", r"\left\{ \frac{1}{2}, \{3\} \right\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),  # an escaped brace is no brace
        (r"\fbox{3}", "3"),
        (r"\framebox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed 2", "2"),
        (r"$\boxed 42$.", "42"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"\\boxed{7}", "7"),  # escaped once too often
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),  # cut off: not closed, no box
        (r"\boxed{5} but \boxed{}", "5"),
        (r"{{ \boxed{5}", "5"),
        (r"}} \boxed{5}", "5"),
        (r"I put it in a \boxed answer: \boxed{5}", "5"),
        ("sum\n#### 1,234", "1,234"),
        ("#### 1\n#### 2\n", "2"),
        ("#### 2 eggs per day", "2 eggs per day"),
        ("#### **2**", "**2**"),
        (r"#### 3 but \boxed{4}", "4"),
    ],
)
def test_the_last_closed_box_counts_then_the_last_hashes(text, answer):
    assert extract(text, strict=True) == answer
    assert extract(text, strict=False) == answer


@pytest.mark.parametrize(
    "text", ["The answer is 5.", "Answer: 5", "5", "", "boxed{5}", r"\boxed", r"\boxed{", "##### 5"]
)
def test_a_right_number_in_the_prose_is_no_answer_in_strict_mode(text):
    assert extract(text, strict=True) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First, 3. The answer is 5. I checked 2 ways", "5"),
        ("**Answer:** 1/2\n", "1/2"),
        ("Answer: $x=3$", "$x=3$"),
        ("the final answer is: **7**.", "7"),
        ("**The answer is**\n\n7", "7"),
        ("so 3 + 4 = 7", "7"),
        ("about 1,234.5 m.", "1,234.5"),
        ("none", None),
    ],
)
def test_lenient_mode_takes_what_the_prose_says(text, answer):
    assert extract(text, strict=False) == answer


@pytest.mark.parametrize(
    ("answer", "unit"),
    [
        ("5 cm", "cm"),
        (r"5 \mathrm{~cm}", r"\mathrm{cm}"),
        (r"5\,\text{cm}", "cm"),
        (r"5\%", r"\%"),
        ("5", "cm"),
        ("$5$", "$m$"),
    ],
)
def test_the_unit_of_a_row_may_follow_the_answer(answer, unit):
    assert quick("5", without_unit(answer, unit))


# ---- time, crashes, batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("math"), grader_timeout=1.5, math_match="value")
    yield task
    task.close()


def boxed(*answers):
    return [(Prompt(0, (), "1", {}), f"\\boxed{{{answer}}}") for answer in answers]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_hanging_answer_scores_zero_within_the_limit_and_the_next_is_judged(impatient, threaded):
    impatient.rewards(boxed("2-1"))
    found = []

    def grade():
        start = time.monotonic()
        found.append([reward.outcome for reward in impatient.rewards(boxed(TOWER, "3-2", "1+1"))])
        found.append(time.monotonic() - start)

    if threaded:
        thread = threading.Thread(target=grade)
        thread.start()
        thread.join()
    else:
        grade()
    assert found[0] == ["timeout", "right", "wrong"]
    assert found[1] < 1.5 + 6  # the limit, and a new worker's start on a busy machine


@pytest.mark.parametrize("answer", [r"9^{9^{9^{9}}}", r"\frac{1}{" * 3000, "(" * 5000, r"x^{" * 500 + "1" + "}" * 500])
def test_no_answer_harms_the_next(impatient, answer):
    outcomes = [reward.outcome for reward in impatient.rewards(boxed("0+1", answer, "2-1"))]
    assert outcomes[0] == outcomes[2] == "right"
    assert outcomes[1] in ("wrong", "timeout", "grader_error", "no_answer")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["1", "x+1", "(1,2)"]), st.sampled_from(["1", "x+1", "1+x", "(1, 2)", "{", "", "2"])),
        max_size=8,
    )
)
def test_a_batch_is_graded_as_one_at_a_time(task, pairs):
    batch = [(Prompt(i, (), gold, {}), f"\\boxed{{{answer}}}") for i, (gold, answer) in enumerate(pairs)]
    assert task.rewards(batch) == [task.reward(prompt, text) for prompt, text in batch]


def test_a_run_never_loads_sympy_itself(task):
    task.rewards(boxed("2-1"))
    assert "math_verify" not in sys.modules


# ---- data sets ---------------------------------------------------------------------------------------------------

FORMATS = {
    "gsm8k": ({"question": "Q", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"}, "Q", "1,005"),
    "svamp": ({"Body": "Two sat", "Question": "How many?", "Answer": 2.0, "ID": "c"}, "Two sat. How many?", "2"),
    "multiarith": ({"input": "Q", "target": 7}, "Q", "7"),
    "math": ({"problem": "P", "solution": r"It is \boxed{3}", "answer": r"\frac{1}{2}"}, "P", r"\frac{1}{2}"),
    "math without answer": ({"problem": "P", "solution": r"No \boxed{2}: \boxed{\frac{1}{2}}"}, "P", r"\frac{1}{2}"),
    "aime24": ({"id": 1, "problem": "P", "solution": r"\boxed{9}", "answer": "204", "question": "P"}, "P", "204"),
    "amc23": ({"id": 0, "problem": "P", "answer": 27.0, "question": "P"}, "P", "27"),
    "college_math": ({"data_source": "college_math.A", "question": "Q", "answer": "$10-4 n$"}, "Q", "$10-4 n$"),
    "minerva": ({"problem": "P", "solution": r"First \boxed{1}, so \boxed{4.5e33} erg", "idx": 0}, "P", "4.5e33"),
    "olympiadbench": (
        {"question": "Q", "context": "C", "final_answer": ["$1$", "$2$"], "is_multiple_answer": True, "unit": None},
        "C\nQ",
        "$1$, $2$",
    ),
    "verl": ({"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "5"}, "id": 1}, "Q", "5"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "question", "gold"), FORMATS.values(), ids=FORMATS)
def test_each_data_set_is_read_as_it_is_published(tmp_path, task, row, question, gold):
    (prompt,) = load_task(f"math:{write(tmp_path / 'x.jsonl', row)}", DataConfig(), 0, tmp_path).prompts()
    assert prompt.messages == ({"role": "user", "content": question},)
    assert prompt.gold == gold
    assert task.reward(prompt, f"\\boxed{{{gold}}}").outcome == "right"
    assert task.reward(prompt, "\\boxed{123456}").outcome == "wrong"


def test_the_rows_unit_is_taken_off_the_answer(tmp_path):
    row = {"question": "Q", "final_answer": ["5"], "is_multiple_answer": False, "unit": "furlongs"}
    task = load_task(f"math:{write(tmp_path / 'x.jsonl', row)}", DataConfig(), 0, tmp_path)
    (prompt,) = task.prompts()
    assert task.reward(prompt, r"\boxed{5 \text{ furlongs}}").outcome == "right"
    assert task.reward(prompt, r"\boxed{5}").outcome == "right"
    assert task.reward(prompt, r"\boxed{5 \text{ miles}}").outcome == "wrong"
    task.close()


def test_other_files_are_read_through_fields(tmp_path):
    path = write(tmp_path / "x.jsonl", {"ask": "Q", "tell": 3, "question": "no", "answer": "no"})
    data = DataConfig(fields={"prompt": "ask", "answer": "tell"}, system="S", instruction=" Think.")
    (prompt,) = load_task(f"math:{path}", data, 0, tmp_path).prompts()
    assert [message["content"] for message in prompt.messages] == ["S", "Q Think."]
    assert prompt.gold == "3"


def test_ready_messages_get_no_instruction_and_keep_their_system(tmp_path):
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "Q"}]
    path = write(
        tmp_path / "x.jsonl", *({"prompt": turns, "reward_model": {"ground_truth": "5"}} for turns in (chat, chat[1:]))
    )
    first, second = load_task(f"math:{path}", DataConfig(system="S", instruction="I"), 0, tmp_path).prompts()
    assert [message["content"] for message in first.messages] == ["own", "Q"]
    assert [message["content"] for message in second.messages] == ["S", "Q"]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "Q"}, "answer = None should be a text or a number"),
        ({"answer": "5"}, "question = nothing"),
        ({"question": "Q", "answer": True}, "answer = True"),
        ({"question": "Q", "answer": "so\n####  "}, "holds no answer"),
        ({"question": "Q", "answer": "$ $."}, "holds no answer"),
        ({"problem": "P", "solution": "no box"}, r"solution holds no \boxed answer"),
        ({"question": "Q", "final_answer": "5"}, "final_answer = '5' should be a list"),
        ({"prompt": "Q", "reward_model": "5"}, "reward_model should be an object"),
        ({"prompt": [], "reward_model": {"ground_truth": "5"}}, "prompt"),
        ({"prompt": [{"role": "bot", "content": ""}], "reward_model": {"ground_truth": "5"}}, "prompt[0]"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, named):
    path = write(tmp_path / "x.jsonl", {"question": "Q", "answer": "1"}, row)
    with pytest.raises(DataError) as error:
        load_task(f"math:{path}", DataConfig(), 0, tmp_path)
    assert f"{path}, line 2: " in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize("gold", ["12:00", r"\frac{1}{0}", r"9^{9^{9^{9}}}"])
def test_a_gold_answer_that_cannot_be_judged_is_an_error_of_its_row_when_it_is_read(tmp_path, gold):
    path = write(tmp_path / "x.jsonl", {"question": "Q", "answer": "x+1"}, {"question": "Q", "answer": gold})
    with pytest.raises(DataError) as error:
        load_task(f"math:{path}", DataConfig(grader_timeout=2.0), 0, tmp_path)
    assert f"{path}, line 2: the gold answer {gold!r} cannot be judged" in str(error.value)


def test_a_stored_answer_to_such_a_gold_answer_is_an_error_of_the_data(task):
    assert task.reward(Prompt(0, (), "12:00", {}), r"\boxed{x+5}").outcome == "data_error"


PUBLISHED = {
    "gsm8k/train.jsonl": 7473,
    "gsm8k/test.jsonl": 1319,
    "svamp/test.jsonl": 1000,
    "multiarith/test.jsonl": 600,
    **{f"formats/{name}.jsonl": 2 for name in ("aime24", "amc23", "college_math", "minerva_math", "olympiadbench")},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_gold_answer_boxed_and_given_back_is_right(name, tmp_path):
    path = Path(os.environ.get("DPH_DATA", "nowhere"), name)
    if not path.is_file():
        pytest.skip("needs the published data in the folder $DPH_DATA")
    task = load_task(f"math:{path}", DataConfig(), 0, tmp_path)
    prompts = task.prompts()
    assert len(prompts) == PUBLISHED[name]
    assert all(reward.outcome == "right" for reward in task.rewards([(p, f"\\boxed{{{p.gold}}}") for p in prompts]))
    # Written otherwise, and wrong ones:
    whole = [p for p in prompts if re.fullmatch(r"-?[\d,]+", p.gold)]
    assert all(
        r.value == 1 for r in task.rewards([(p, f"\\boxed{{{int(p.gold.replace(',', ''))}.00}}") for p in whole])
    )
    assert all(r.value == 0 for r in task.rewards([(p, f"\\boxed{{{p.gold}9}}") for p in whole]))
    task.close()
