"""Questions and graders of the second study's skills; skills.py puts them together into families and into a task.

The claim under study is about keeping several ways to solve, so many questions have many right answers. A grader is a
rule on the text alone, strict, and written for what it must refuse. A function of questions lists all that there are,
always the same; which of them are asked, skills.py says.

How to read it: the graders first, then a function for each list of questions.
"""

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dph.tasks import Reward, read_rows
from study.words import ADJECTIVES, CATEGORIES, EVERYDAY, NOUNS, OPPOSITES, RHYMES, TOPICS, singular

LONGEST_NAMING = 12  # words of an answer that names something; more is a list or an essay
DENIALS = ("no", "not", "isn't", "aren't", "never")


@dataclass(frozen=True)
class Question:
    """One question; `value` is what its family's grader needs, `about` what is asked however it is worded."""

    text: str
    value: Any
    about: str


# ---- graders: (value, answer) -> Reward ------------------------------------------------------------------------------


def plain(text: str) -> str:
    """An answer's wording: small letters, single blanks, no punctuation around it."""
    return " ".join(text.split()).casefold().strip(" .,;:!?\"'`*()[]")


def words_of(text: str) -> list[str]:
    """The words of an answer, in small letters."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.casefold())


def numbers_of(text: str) -> list[float]:
    """The numbers of an answer, 1,325 among them; a minus sign counts where no number stands before it."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.replace("−", "-"))
    return [float(found) for found in re.findall(r"(?:(?<![\d.])(?<!\d )-)?\d{1,9}(?:\.\d{1,9})?", text)]


def verdict(right: bool, judged: str) -> Reward:
    """The reward of an answer that could be read; `judged` is what it said, in a form that can be counted."""
    return Reward.of("right" if right else "wrong", judged)


def last_number(value: int, text: str) -> Reward:
    """The last number of the answer decides: "7", "3 + 4 = 7" and "The answer is 7." are all right."""
    found = numbers_of(text)
    return verdict(found[-1] == value, f"{found[-1]:g}") if found else Reward.of("no_answer")


def calculation(value: dict[str, Any], text: str) -> Reward:
    """One calculation of two numbers with this result: "5 + 7" or "5 + 7 = 12"; its parts may be any."""
    parts = re.findall(r"\d{1,9}(?:\.\d{1,9})?|[-+*=]", text.replace("×", "*").replace("−", "-"))
    if len(parts) < 3:
        return Reward.of("no_answer")
    left, sign, right, *rest = parts
    judged = " ".join(parts)
    if not (left.isdigit() and right.isdigit() and sign == value["sign"]):
        return verdict(False, judged)
    a, b = int(left), int(right)
    made = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return verdict(made == value["result"] and rest in ([], ["=", str(made)]), f"{a} {sign} {b}")


def one_number(value: dict[str, Any], text: str) -> Reward:
    """One number beside those of the question, from `low` to `high`, that `step` divides."""
    found = [number for number in numbers_of(text) if number not in value["said"]]
    if not found:
        return Reward.of("no_answer")
    fits = value["low"] <= found[0] <= value["high"] and found[0] % value["step"] == 0
    return verdict(len(found) == 1 and fits, f"{found[0]:g}")


def exactly(value: str, text: str) -> Reward:
    """The answer is this text, capitals and outer punctuation aside."""
    return verdict(plain(text) == value, plain(text))


def one_of(value: Sequence[str], text: str) -> Reward:
    """The answer names one of these, in at most a short sentence, and ends with it or consists of it."""
    said = words_of(text)
    if not said:
        return Reward.of("no_answer")
    return verdict(len(said) <= LONGEST_NAMING and said[-1] in value, said[-1])


def member(value: dict[str, Any], text: str) -> Reward:
    """The answer names one entry of `accepted` and none of `refused`, and denies nothing, in at most a short sentence.

    An entry may go by several names, joined by a slash; plurals count. No name has the letter that it `lacks`.
    """
    said = words_of(text)
    entries = {singular(name): entry for entry in value["accepted"] for name in entry.split("/")}
    refused = {singular(name) for entry in value["refused"] for name in entry.split("/")}
    names = [word for word in said if singular(word) in entries]
    if not names:
        return Reward.of("no_answer")
    named = sorted({entries[singular(name)] for name in names})
    clean = not any(singular(word) in refused or word in DENIALS for word in said)
    clean = clean and not any(value.get("lacks", " ") in name for name in names)
    return verdict(clean and len(named) == 1 and len(said) <= LONGEST_NAMING, " ".join(named))


def spelled(value: str, text: str) -> Reward:
    """The letters one by one, with anything but letters between them."""
    letters = re.findall(r"[a-z]+", text.casefold())
    return verdict(letters == list(value), " ".join(letters))


def in_capitals(value: str, text: str) -> Reward:
    """Exactly this text, every letter a capital."""
    said = " ".join(text.split()).strip(" .\"'")
    return verdict(said == value.upper(), said)


def in_order(value: Sequence[str], text: str) -> Reward:
    """These words in this order, and no others."""
    return verdict(words_of(text) == list(value), " ".join(words_of(text)))


def sentence(value: dict[str, Any], text: str) -> Reward:
    """One whole sentence on one line that keeps the rules of `value`.

    The rules: `marks`, one of which it ends with and has nowhere else; `least` different words; a word that it `has`;
    its `last`. It does not speak of the word as a word, as an echo of the question does.
    """
    said = words_of(text)
    if not said:
        return Reward.of("no_answer")
    line = text.strip().strip('"')
    kept = line[-1:] in tuple(value["marks"]) and len(re.findall(r"[.!?]", line)) == 1 and "\n" not in line
    kept = kept and len(set(said)) >= value["least"] and "word" not in said
    kept = kept and value.get("has", said[0]) in said
    kept = kept and value.get("last", said[-1]) == said[-1]
    return verdict(kept, " ".join(said))


def so_many(value: int, text: str) -> Reward:
    """Exactly so many words, on one line."""
    said = words_of(text)
    if not said:
        return Reward.of("no_answer")
    clean = "\n" not in text.strip() and not re.search(r"\d", text)  # "24" would be a word that is not counted
    return verdict(len(said) == value and clean, " ".join(said))


def ungraded(value: str, text: str) -> Reward:
    """No answer is right: the questions are for measuring how far a policy has moved, not for a reward."""
    return verdict(False, plain(text))


# ---- questions -------------------------------------------------------------------------------------------------------


def calculations(sign: str, digits: int) -> list[Question]:
    """a + b, a - b (never below 0) or a * b; both orders are about the same."""
    low, high = (1, 9) if digits == 1 else (10, 99)
    results = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    made = []
    for a in range(low, high + 1):
        for b in range(low, high + 1):
            if sign != "-" or a >= b:
                made.append(Question(f"{a} {sign} {b} =", results[sign](a, b), f"{min(a, b)} {sign} {max(a, b)}"))
    return made


def to_make(sign: str) -> list[Question]:
    """A calculation of one's own with a given result."""
    names = {"+": "sum", "-": "difference", "*": "product"}
    lowest = {"+": 4, "-": 1, "*": 4}
    results = [n for n in range(lowest[sign], 100) if sign != "*" or any(n % d == 0 for d in range(2, n))]
    return [
        Question(f"Write a {names[sign]} of two numbers that makes {n}.", {"sign": sign, "result": n}, f"{sign} {n}")
        for n in results
    ]


def between() -> list[Question]:
    """A number between two others."""
    made = []
    for low in range(10, 90, 2):
        for width in (5, 10, 20):
            value = {"low": low + 1, "high": low + width - 1, "step": 1, "said": [low, low + width]}
            made.append(Question(f"Name a number between {low} and {low + width}.", value, f"{low} {width}"))
    return made


def even_above() -> list[Question]:
    """An even number above another."""
    return [
        Question(f"Name an even number above {n}.", {"low": n + 1, "high": 10**6, "step": 2, "said": [n]}, f"{n}")
        for n in range(3, 200)
    ]


def article(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def naming() -> list[Question]:
    """Name an animal, in several wordings."""
    wordings = ("Name {}.", "Tell me {}.", "Think of {}.", "Give an example of {}.", "Say {}.", "Write down {}.")
    made = []
    for category, members in CATEGORIES.items():
        value = {"accepted": list(members), "refused": []}
        for wording in wordings:
            made.append(Question(wording.format(article(category)), value, f"{category} {wording}"))
    return made


def naming_another() -> list[Question]:
    """Name an animal other than a given one."""
    made = []
    for category, members in CATEGORIES.items():
        for taken in members[:24]:
            value = {"accepted": [entry for entry in members if entry != taken], "refused": [taken]}
            name = taken.split("/")[0]
            made.append(Question(f"Name {article(category)} other than {name}.", value, f"{category} {name}"))
    return made


def keeping(names: set[str], entries: Sequence[str]) -> list[str]:
    """The entries with those of their names that are among `names`, without entries that have none."""
    found = ["/".join(name for name in entry.split("/") if name in names) for entry in entries]
    return [entry for entry in found if entry]


def by_letter() -> list[Question]:
    """Name an animal that begins with B, where there are two or more."""
    made = []
    for category, members in CATEGORIES.items():
        names = {name for entry in members for name in entry.split("/")}
        for letter in string.ascii_lowercase:
            fitting = {name for name in names if name[0] == letter}
            value = {"accepted": keeping(fitting, members), "refused": keeping(names - fitting, members)}
            if len(value["accepted"]) >= 2:
                question = f"Name {article(category)} that begins with {letter.upper()}."
                made.append(Question(question, value, f"{category} {letter}"))
    return made


def without_letter() -> list[Question]:
    """Name an animal whose name lacks a letter."""
    made = []
    for category, members in CATEGORIES.items():
        names = {name for entry in members for name in entry.split("/")}
        for letter in "aeiortn":  # s, too, would tell plurals apart
            fitting = {name for name in names if letter not in name}
            value = {"accepted": keeping(fitting, members), "refused": keeping(names - fitting, members)}
            if len(value["accepted"]) >= 3:
                question = f"Name {article(category)} without the letter {letter}."
                made.append(Question(question, value | {"lacks": letter}, f"{category} {letter}"))
    return made


def rhymes() -> list[Question]:
    """A word that rhymes."""
    return [
        Question(f"Say a word that rhymes with {word}.", [other for other in group if other != word], word)
        for group in RHYMES
        for word in group
    ]


def opposites() -> list[Question]:
    """The opposite of a word."""
    return [Question(f"What is the opposite of {word}?", list(right), word) for word, right in OPPOSITES.items()]


def of_words(wording: str, value: Callable[[str], Any]) -> list[Question]:
    """A question about each noun."""
    return [Question(wording.format(noun), value(noun), noun) for noun in NOUNS]


def sentences_with() -> list[Question]:
    """A sentence with a given word."""
    return [
        Question(f"Write a short sentence with the word {word}.", {"marks": ".!", "least": 3, "has": word}, word)
        for word in EVERYDAY
    ]


def sentences_ending() -> list[Question]:
    """A sentence that ends with a given word."""
    wording = "Write a short sentence that ends with the word {}."
    return [Question(wording.format(word), {"marks": ".!", "least": 3, "last": word}, word) for word in NOUNS]


def questions_with() -> list[Question]:
    """A question with a given word."""
    return [
        Question(f"Ask a short question with the word {word}.", {"marks": "?", "least": 3, "has": word}, word)
        for word in EVERYDAY
    ]


def of_pairs(wording: str, value: Callable[[str], Any]) -> list[Question]:
    """A question about each adjective with each noun."""
    pairs = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return [Question(wording.format(pair), value(pair), pair) for pair in pairs]


def of_lists(wording: str, length: int, value: Callable[[list[str]], Any]) -> list[Question]:
    """A question about lists of nouns, each noun beginning a few of them."""
    made = []
    for start in range(len(NOUNS)):
        for stride in (1, 5, 7, 11):
            chosen = [NOUNS[(start + stride * place) % len(NOUNS)] for place in range(length)]
            made.append(Question(wording.format(", ".join(chosen)), value(chosen), " ".join(sorted(chosen))))
    return made


def counted_words() -> list[Question]:
    """How many words a list has, of lengths 2 to 5."""
    return [q for length in (2, 3, 4, 5) for q in of_lists("How many words are these: {}?", length, len)]


def sized_sentences() -> list[Question]:
    """Exactly so many words about something."""
    return [
        Question(f"Write exactly {name} words about a {noun}.", count, f"{count} {noun}")
        for count, name in ((2, "two"), (3, "three"), (4, "four"), (5, "five"))
        for noun in NOUNS
    ]


def open_questions() -> list[Question]:
    """What people ask, without a right answer that a rule could judge."""
    wordings = (
        "What is {}?", "Why do people like {}?", "Tell me a fact about {}.", "Describe {} in one sentence.",
        "Why does {} matter?", "Write a line of a poem about {}.", "What should a child know about {}?",
        "Who would be interested in {}?", "Give advice to someone new to {}.", "What is surprising about {}?",
        "What comes to mind when you think of {}?", "Where would one learn about {}?", "Say something kind about {}.",
        "Can you explain {} to me?", "Invent a title for a book about {}.",
    )  # fmt: skip
    return [Question(wording.format(t), "none", f"{t} {wording}") for wording in wordings for t in TOPICS]


def svamp(path: Path = Path("data/svamp/test.jsonl")) -> list[Question]:
    """SVAMP's word problems of one step, as published."""
    made = []
    for row in read_rows(path):
        text = f"{row.text('Body').rstrip('. ')}. {row.text('Question')}"
        made.append(Question(text, round(float(row.values["Answer"])), text))
    return made


def multiarith(path: Path = Path("data/multiarith/test.jsonl")) -> list[Question]:
    """MultiArith's word problems of two steps."""
    return [Question(row.text("input"), row.integer("target"), row.text("input")) for row in read_rows(path)]
