"""The second study's tasks: small skills of a language model that somebody else trained, in one own task.

    data.train = "task:study/skills.py?family=sums1+name&split=train&count=60"

A source names one family or several, joined by +, `count` questions of each, or so many as stand behind a family's
colon: `family=sums1:40+name:20`. A hash of what a question is about decides
whether it is for training (a half), validation (a sixth) or test (a third), so the three share nothing at any seed. The
seed chooses among those. `shots=N` puts N of the family's worked examples before each question, as earlier turns.

How to read it: `FAMILIES` is the table of all there is; families.py holds its questions and graders.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dph.config import DataConfig
from dph.errors import UserError
from dph.tasks import Prompt, Reward, Task, chat, known_options, whole_number
from study import families as f
from study.families import Question

SPLITS = ("train", "validation", "test")
OPTIONS = ("family", "split", "count", "shots")
SOURCES = ("families.py", "words.py")  # what a reward depends on beside this file


@dataclass(frozen=True)
class Family:
    """All questions of one kind.

    Args:
        group: what the family is in the study's tables.
        questions: makes the list of all questions.
        grade: the reward of (value of a question, answer).
        shots: worked examples, (question, answer); they are asked nowhere.
    """

    group: str
    questions: Callable[[], list[Question]]
    grade: Callable[[Any, str], Reward]
    shots: Sequence[tuple[str, str]]


FAMILIES: dict[str, Family] = {
    # One right number, however it is said.
    "sums1": Family("arithmetic", lambda: f.calculations("+", 1), f.last_number, [("3 + 4 =", "3 + 4 = 7")]),
    "differences1": Family("arithmetic", lambda: f.calculations("-", 1), f.last_number, [("9 - 4 =", "9 - 4 = 5")]),
    "products1": Family("arithmetic", lambda: f.calculations("*", 1), f.last_number, [("3 * 4 =", "3 * 4 = 12")]),
    "sums2": Family("arithmetic", lambda: f.calculations("+", 2), f.last_number, [("31 + 24 =", "31 + 24 = 55")]),
    "differences2": Family(
        "arithmetic", lambda: f.calculations("-", 2), f.last_number, [("58 - 24 =", "58 - 24 = 34")]
    ),
    "products2": Family("arithmetic", lambda: f.calculations("*", 2), f.last_number, [("12 * 11 =", "12 * 11 = 132")]),
    "svamp": Family(
        "word problems", f.svamp, f.last_number,
        [("Ann has 3 pens and buys 4 more. How many pens does Ann have now?", "3 + 4 = 7")],
    ),
    "multiarith": Family(
        "word problems", f.multiarith, f.last_number,
        [("Ann had 9 pens, lost 2 and bought 4 more. How many pens does she have?", "9 - 2 + 4 = 11")],
    ),
    # Many right numbers.
    "make_sum": Family(
        "numbers of one's own", lambda: f.to_make("+"), f.calculation,
        [("Write a sum of two numbers that makes 9.", "2 + 7 = 9")],
    ),
    "make_difference": Family(
        "numbers of one's own", lambda: f.to_make("-"), f.calculation,
        [("Write a difference of two numbers that makes 6.", "14 - 8 = 6")],
    ),
    "make_product": Family(
        "numbers of one's own", lambda: f.to_make("*"), f.calculation,
        [("Write a product of two numbers that makes 6.", "2 * 3 = 6")],
    ),
    "between": Family(
        "numbers of one's own", f.between, f.one_number, [("Name a number between 200 and 210.", "204")]
    ),
    "even_above": Family(
        "numbers of one's own", f.even_above, f.one_number, [("Name an even number above 200.", "206")]
    ),
    # Many right words.
    "name": Family("naming", f.naming, f.member, [("Name a continent.", "Europe")]),
    "name_other": Family("naming", f.naming_another, f.member, [("Name a continent other than Asia.", "Europe")]),
    "name_letter": Family("naming", f.by_letter, f.member, [("Name a continent that begins with E.", "Europe")]),
    "name_without": Family("naming", f.without_letter, f.member, [("Name a continent without the letter u.", "Asia")]),
    "rhyme": Family("words", f.rhymes, f.one_of, [("Say a word that rhymes with hill.", "mill")]),
    "opposite": Family("words", f.opposites, f.one_of, [("What is the opposite of war?", "peace")]),
    # One right spelling.
    "first_letter": Family(
        "letters", lambda: f.of_words("What is the first letter of {}?", lambda word: word[0]), f.exactly,
        [("What is the first letter of honey?", "h")],
    ),
    "last_letter": Family(
        "letters", lambda: f.of_words("What is the last letter of {}?", lambda word: word[-1]), f.exactly,
        [("What is the last letter of honey?", "y")],
    ),
    "spell": Family(
        "letters", lambda: f.of_words("Spell {}, letter by letter.", str), f.spelled,
        [("Spell honey, letter by letter.", "h o n e y")],
    ),
    "backwards": Family(
        "letters", lambda: f.of_words("Write {} backwards.", lambda word: word[::-1]), f.exactly,
        [("Write honey backwards.", "yenoh")],
    ),
    # Lists of words.
    "last_word": Family(
        "lists", lambda: f.of_lists("What is the last word of: {}", 3, lambda words: words[-1]), f.exactly,
        [("What is the last word of: honey, field, tower", "tower")],
    ),
    "count_words": Family(
        "lists", f.counted_words, f.last_number, [("How many words are these: honey, field, tower?", "3")]
    ),
    "sort_words": Family(
        "lists", lambda: f.of_lists("Put in alphabetical order: {}", 3, sorted), f.in_order,
        [("Put in alphabetical order: tower, honey, field", "field, honey, tower")],
    ),
    # Instructions that a rule can verify.
    "copy": Family(
        "instructions", lambda: f.of_pairs("Repeat: {}", str), f.exactly, [("Repeat: sweet honey", "sweet honey")]
    ),
    "capitals": Family(
        "instructions", lambda: f.of_pairs("Write in capital letters: {}", str), f.in_capitals,
        [("Write in capital letters: sweet honey", "SWEET HONEY")],
    ),
    "so_many_words": Family(
        "instructions", f.sized_sentences, f.so_many, [("Write exactly three words about a bee.", "It makes honey.")]
    ),
    # Sentences with many right wordings.
    "sentence_with": Family(
        "sentences", f.sentences_with, f.sentence,
        [("Write a short sentence with the word honey.", "The bees make honey in summer.")],
    ),
    "sentence_end": Family(
        "sentences", f.sentences_ending, f.sentence,
        [("Write a short sentence that ends with the word honey.", "We all like honey.")],
    ),
    "question_with": Family(
        "sentences", f.questions_with, f.sentence,
        [("Ask a short question with the word honey.", "Do you like honey?")],
    ),
    # No right answer: what is measured there is how far the policy has moved.
    "open": Family(
        "open questions", f.open_questions, f.ungraded, [("What is honey?", "A sweet food that bees make.")]
    ),
}  # fmt: skip


class Skills(Task):
    """`count` questions of each family named."""

    def __init__(self, options: dict[str, str], data: DataConfig, seed: int) -> None:
        known_options("skills", options, OPTIONS)
        split = options.get("split", "train")
        if split not in SPLITS:
            raise UserError(f"skills: split = {split!r} should be one of {', '.join(SPLITS)}")
        count = whole_number("skills", options, "count", default=40, low=1, high=10_000)
        shots = whole_number("skills", options, "shots", default=0, low=0, high=1)
        asked: list[tuple[str, Question]] = []
        for name, wanted in counts(options.get("family", ""), count).items():
            asked += [(name, question) for question in draw(name, split, wanted, seed)]
        random.Random(f"order {seed}").shuffle(asked)
        prompts = []
        for index, (name, question) in enumerate(asked):
            *system, last = chat(question.text, data.system, data.instruction)
            messages = (*system, *turns(FAMILIES[name].shots[:shots]), last)
            prompts.append(Prompt(index, messages, gold=[name, question.value], meta={"skill": name}))
        super().__init__("skills", prompts)

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Judges a batch of (prompt, answer), each by its family's grader."""
        rewards = []
        for prompt, text in pairs:
            name, value = prompt.gold
            rewards.append(FAMILIES[name].grade(value, text))
        return rewards

    def content(self) -> dict[str, str]:
        """The hashes of the files that hold questions and graders."""
        here = Path(__file__).parent
        return {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in SOURCES}


def counts(families: str, default: int) -> dict[str, int]:
    """How many questions of each family, as named. UserError: no such family, one named twice, or no count."""
    wanted: dict[str, int] = {}
    for part in families.split("+"):
        name, colon, count = part.partition(":")
        if name not in FAMILIES:
            raise UserError(f"skills: family = {name!r} should be some of {', '.join(FAMILIES)}, joined by +")
        if name in wanted:
            raise UserError(f"skills: family = {families!r} names {name} twice")
        given = {"count": count} if colon else {}
        wanted[name] = whole_number(f"skills, {name}", given, "count", default, low=1, high=10_000)
    return wanted


def draw(name: str, split: str, count: int, seed: int) -> list[Question]:
    """`count` questions of one split of a family, chosen by the seed. UserError: there are not as many."""
    there = questions_of(name, split)
    if count > len(there):
        raise UserError(f"skills: count = {count} should be at most {len(there)}, all there are of {name}, {split}")
    return random.Random(f"{name} {split} {seed}").sample(there, count)


def questions_of(name: str, split: str) -> list[Question]:
    """All questions of one split of a family, its worked examples left out."""
    family = FAMILIES[name]
    examples = {question for question, _ in family.shots}
    return [q for q in family.questions() if q.text not in examples and split_of(name, q.about) == split]


def split_of(name: str, about: str) -> str:
    """Where a question belongs, by what it is about: a half train, a sixth validation, a third test."""
    sixth = hashlib.sha256(f"{name} {about}".encode()).digest()[0] % 6
    return "train" if sixth < 3 else "validation" if sixth == 3 else "test"


def turns(examples: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Worked examples as earlier turns of the chat."""
    return [
        {"role": role, "content": text}
        for example in examples
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
