"""The miniature's world, task and base model."""

import itertools
import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import torch

from dph.config import DataConfig
from dph.errors import UserError
from dph.miniature_base import Pair, Recipe, batches, build_base, collate, encode, train, write_tokenizer
from dph.model_folder import load_model
from dph.tasks import load_task
from dph.tasks.base import Prompt
from dph.tasks.miniature import COUNTS, MiniatureTask, style_of, style_spread, write_databases
from dph.tasks.miniature_world import (
    CITIES,
    DATABASES,
    FAMILIES,
    GOLD_STYLES,
    READINGS,
    SUMS,
    Question,
    corpus,
    draw_question,
    draw_sum,
    final_number,
    gold_style,
    joined,
    make_rows,
    query,
    recognise,
    split_of,
    sum_of,
    truth,
    vocabulary,
    worked,
)
from dph.tasks.sqlite import execute, same_result
from dph.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import initialize

TINY = Recipe(
    pairs=400, steps=20, batch=32, microbatch=16, lr=5e-3, warmup_steps=5, layers=1, width=32, feed_forward=64
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def base(home: Path) -> Path:
    return build_base(home, 0, threads=1, progress=False, recipe=TINY)


def questions(count: int, seed: int = 0) -> list[Question]:
    rng = random.Random(seed)
    return [draw_question(rng, DATABASES) for _ in range(count)]


def task(where: str, home: Path, seed: int = 0, **options: str) -> MiniatureTask:
    return MiniatureTask(where, options, DataConfig(), seed, home)


def texts(task: MiniatureTask) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in task.prompts()]


# The world


def test_databases_hold_what_makes_styles_differ() -> None:
    for database in DATABASES:
        parents, children = make_rows(database, seed=0)
        _, names, pids, cities, wide, narrow = zip(*children, strict=True)
        assert (len(parents), len(children), len(set(names))) == (10, 80, 70)
        assert len(set(wide)) == 80
        assert 10 <= min(wide) <= max(wide) <= 99
        assert narrow.count(None) > 0
        assert set(narrow) - {None} == set(range(1, 10))
        assert set(cities) == set(CITIES)
        assert Counter(pids)[1] > 2 * Counter(pids)[10]  # skewed


def test_every_reading_of_every_style_executes_and_is_recognised(home: Path) -> None:
    files = write_databases(home, 0)
    for question in questions(300):
        readings = itertools.product(range(3), range(2), READINGS[question.word])
        for style, column, comparison in readings:
            text = query(question, style, column, comparison)
            assert recognise(question.family, text) == style, text
            assert execute(files[question.database], joined(text)).error is None, text


def test_styles_differ_on_some_questions_of_each_family_and_agree_on_others(home: Path) -> None:
    files = write_databases(home, 0)
    agreeing: dict[str, set[bool]] = {family: set() for family in FAMILIES}
    for question in questions(400):
        told = [query(question, style, question.column, truth(question.word)) for style in range(3)]
        rows = [execute(files[question.database], joined(text)).rows for text in told]
        agreeing[question.family].add(all(same_result(rows[0], other, "bag") for other in rows[1:]))
    assert agreeing == {family: {True, False} for family in FAMILIES}


def test_the_gold_style_is_drawn_by_its_weights_and_depends_on_the_seed() -> None:
    drawn = list({question.text: question for question in questions(6000)}.values())
    counts = Counter(gold_style(question, 0) for question in drawn)
    for style, weight in enumerate(GOLD_STYLES):
        assert counts[style] / len(drawn) == pytest.approx(weight, abs=0.03)
    assert [gold_style(q, 0) for q in drawn] == [gold_style(q, 0) for q in drawn]
    assert [gold_style(q, 0) for q in drawn] != [gold_style(q, 1) for q in drawn]


def test_a_vague_word_has_one_truth() -> None:
    slots = {"child": "cow", "parent": "farmer", "city": "oslo", "low": "4 2", "high": "5 0"}
    question = Question("show cow from oslo with mass past 4 2 ?", "list", "farm", True, slots, 0, "past")
    assert query(question, 0, question.column, truth("past")) == (
        "SELECT name FROM cow WHERE city = 'oslo' AND weight >= 4 2"
    )


def test_two_tenths_of_the_questions_are_for_tests_and_one_for_validation() -> None:
    shares = Counter(split_of(0, str(number)) for number in range(10_000))
    assert {name: round(count / 10_000, 1) for name, count in shares.items()} == {
        "train": 0.7,
        "test": 0.2,
        "validation": 0.1,
    }


def test_the_corpus_holds_the_train_split_alone_and_repeats_itself() -> None:
    pairs = list(corpus(0, 2000))
    assert {split_of(0, question) for question, _ in pairs} == {"train"}
    assert pairs == list(corpus(0, 2000))
    assert sum("SELECT" in answer for _, answer in pairs) / 2000 == pytest.approx(0.6, abs=0.04)


@pytest.mark.parametrize("sign", SUMS)
def test_worked_sums_end_in_the_result_and_show_their_style(sign: str) -> None:
    rng = random.Random(0)
    for question in [question for question in (draw_sum(rng) for _ in range(300)) if question.family == sign]:
        for style in range(3):
            text = worked(question, style, sum_of(question))
            assert final_number(text) == sum_of(question)
            assert recognise(sign, text) == style, text


def test_worked_sums_by_hand() -> None:
    plus = Question("", "+", "arithmetic", False, {"a": "4 2", "b": "3 7"})
    assert worked(plus, 0, 79) == "7 9"
    assert worked(plus, 1, 79) == "4 0 + 3 0 = 7 0 , 2 + 7 = 9 , 7 0 + 9 = 7 9"
    assert worked(plus, 2, 79) == "2 + 7 = 9 , 4 0 + 3 0 = 7 0 , 7 0 + 9 = 7 9"
    times = Question("", "*", "arithmetic", False, {"a": "4 2", "b": "3"})
    assert worked(times, 1, 126) == "4 0 * 3 = 1 2 0 , 2 * 3 = 6 , 1 2 0 + 6 = 1 2 6"
    assert worked(times, 2, 126) == "4 2 + 4 2 + 4 2 = 1 2 6"


@pytest.mark.parametrize(
    ("text", "number"), [("7 9", 79), ("4 + 5 = 9", 9), ("4 + 5", None), ("9 =", None), ("", None)]
)
def test_the_final_number_is_what_an_answer_ends_in(text: str, number: int | None) -> None:
    assert final_number(text) == number


# Words


def test_every_text_round_trips_and_fits(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 128
    pairs = list(corpus(0, 3000))
    for question, answer in pairs:
        assert tokenizer.decode(tokenizer.encode(answer)) == answer
        assert tokenizer.decode(tokenizer.encode(question)) == question
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        assert len(prompt) <= 52
        assert len(tokenizer.encode(answer)) + 1 <= 44
    words = {word for pair in pairs for text in pair for word in text.split()}
    assert words == set(vocabulary())


def test_the_chat_prompt_is_the_begin_token_and_the_question(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "what is 4 2 + 3 7 ?"}])
    assert ids == [tokenizer.bos_id, *tokenizer.encode("what is 4 2 + 3 7 ?")]
    assert tokenizer.end_ids == (2,)


# The task


def test_sets_are_of_full_size_disjoint_and_repeatable(home: Path) -> None:
    sets = {where: texts(task(where, home)) for where in COUNTS}
    assert {where: len(found) for where, found in sets.items()} == COUNTS
    every = [text for found in sets.values() for text in found]
    assert len(set(every)) == len(every)
    assert texts(task("test", home)) == sets["test"]
    assert texts(task("test", home, seed=1)) != sets["test"]
    assert not set(every) - set(sets["train"]) & {question for question, _ in corpus(0, 5000)}


@pytest.mark.parametrize("where", ["validation", "cross"])
def test_gold_answers_earn_one_and_others_nothing(where: str, home: Path) -> None:
    chosen = task(where, home)
    prompts = chosen.prompts()
    assert [reward.outcome for reward in chosen.rewards([(p, p.gold) for p in prompts])] == ["right"] * len(prompts)
    assert [style_of(prompt, prompt.gold) for prompt in prompts] == [prompt.meta["style"] for prompt in prompts]
    assert chosen.reward(prompts[0], "SELECT 1").outcome == "wrong"
    assert chosen.reward(prompts[0], "SELECT nonsense FROM").outcome == "wrong"
    assert chosen.reward(prompts[0], "").outcome == "no_answer"


def test_databases_of_cross_are_never_those_of_training(home: Path) -> None:
    assert {p.meta["database"] for p in task("train", home).prompts()} == {"school", "music", "shop", "sport"}
    assert {p.meta["database"] for p in task("cross", home).prompts()} == {"clinic", "farm"}


def test_a_query_is_judged_by_the_bag_of_its_rows(home: Path) -> None:
    chosen = task("test", home, count="1")
    gold = "SELECT city FROM singer WHERE city = 'rome' OR city = 'oslo'"
    prompt = Prompt(0, (), gold, {"family": "list", "database": "music"})
    assert chosen.reward(prompt, gold + " ORDER BY city DESC").value == 1.0
    assert chosen.reward(prompt, gold.replace("SELECT", "SELECT DISTINCT")).value == 0.0


def test_queries_with_equal_rows_vote_alike_and_failed_ones_not_at_all(home: Path) -> None:
    chosen = task("test", home, count="1")
    gold = "SELECT city FROM singer WHERE city = 'rome' OR city = 'oslo'"
    prompt = Prompt(0, (), gold, {"family": "list", "database": "music"})

    def vote(text: str) -> str | None:
        return chosen.vote(prompt, text, chosen.reward(prompt, text))

    assert vote(gold) == vote(gold + " ORDER BY city DESC") is not None
    assert vote(gold) != vote(gold.replace("SELECT", "SELECT DISTINCT"))
    assert vote("SELECT nonsense FROM") is vote("no query") is None


def test_arithmetic_is_exact(home: Path) -> None:
    chosen = task("arithmetic", home, count="5")
    prompt = chosen.prompts()[0]
    spaced = " ".join(str(prompt.gold))
    assert chosen.reward(prompt, spaced).value == 1.0
    assert chosen.reward(prompt, f"1 + 1 = {spaced}").value == 1.0
    assert chosen.reward(prompt, " ".join(str(prompt.gold + 1))).outcome == "wrong"
    assert chosen.reward(prompt, "SELECT").outcome == "no_answer"


def test_a_damaged_database_is_written_anew_and_a_sound_one_is_left(home: Path, tmp_path: Path) -> None:
    files = write_databases(tmp_path, 3)
    connection = sqlite3.connect(files["farm"])
    connection.execute("DELETE FROM cow WHERE id = 1")
    connection.commit()
    connection.close()
    before = files["shop"].stat().st_ino
    write_databases(tmp_path, 3)
    assert execute(files["farm"], "SELECT COUNT(*) FROM cow").rows == [(80,)]
    assert files["shop"].stat().st_ino == before
    assert sorted(file.name for file in files["shop"].parent.iterdir()) == sorted(file.name for file in files.values())


@pytest.mark.parametrize(
    ("source", "data", "named"),
    [
        ("miniature:tset", DataConfig(), "tset"),
        ("miniature:test?cout=3", DataConfig(), "count"),
        ("miniature:test?count=0", DataConfig(), "count"),
        ("miniature:arithmetic?count=99999", DataConfig(), "different questions"),
        ("miniature:test", DataConfig(system="Be brief."), "data.system"),
    ],
)
def test_a_mistake_is_named(
    source: str, data: DataConfig, named: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dph.tasks.miniature.PATIENCE", 20)
    with pytest.raises(UserError, match=named):
        load_task(source, data, 0, home)


def test_style_spread_by_hand() -> None:
    assert style_spread([0, 0, 1, 2, None]) == pytest.approx((1.5, 0.5))
    assert style_spread([1, 1]) == (0.0, 1.0)


# The base model


def test_a_short_training_lowers_the_loss(tokenizer: Tokenizer, base: Path) -> None:
    pairs = encode(corpus(0, TINY.pairs), tokenizer)
    model = load_model(base)
    initialize(model, 1)
    losses = train(model, pairs, 1, TINY)
    assert len(losses) == TINY.steps
    assert losses[-1] < losses[0] - 0.5


def test_a_base_is_trained_once_and_leaves_nothing_half_done(base: Path, home: Path) -> None:
    stamp = (base / "model.safetensors").stat().st_mtime_ns
    assert build_base(home, 0, progress=False, recipe=TINY) == base
    assert (base / "model.safetensors").stat().st_mtime_ns == stamp
    assert [found.name for found in base.parent.iterdir() if found.is_dir()] == [base.name]


def test_the_same_seed_makes_the_same_base(base: Path, tmp_path: Path) -> None:
    again = load_model(build_base(tmp_path, 0, threads=1, progress=False, recipe=TINY)).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in load_model(base).state_dict().items())


def test_an_interrupted_training_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dph.miniature_base.train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_base(tmp_path, 0, progress=False, recipe=TINY)
    assert list((tmp_path / "miniature-seed0").iterdir()) == []


def test_a_batch_scores_answers_alone() -> None:
    rows: list[Pair] = [([1, 5, 6, 7, 2], 3), ([1, 5, 9, 2], 2)]  # prompts 1 5 6 and 1 5; answers 7 and 9
    inputs, targets = collate(rows)
    assert inputs.tolist() == [[1, 5, 6, 7], [1, 5, 9, 2]]
    assert targets.tolist() == [[-1, -1, 7, 2], [-1, 9, 2, -1]]


def test_an_epoch_holds_each_pair_once() -> None:
    pairs: list[Pair] = [([number] * (1 + number % 3), 1) for number in range(64)]
    taken = [pair for batch in batches(pairs, 0, Recipe(steps=2, batch=32)) for pair in batch]
    assert sorted(taken) == sorted(pairs)


def test_transformers_loads_the_base_with_equal_logits(base: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokens = torch.randint(128, (3, 20), generator=torch.Generator().manual_seed(0))
    model = load_model(base)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(tokens)), oracle(tokens).logits, rtol=1e-4, atol=1e-4)
    assert oracle.generation_config.eos_token_id == 2
