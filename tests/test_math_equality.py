r"""Which answers are right: kinds of gold answers, each with what is the same, what is another, and what is neither.

Each line of a list is `gold ||| answer`. Every verdict is the same whether it is reached at once or in a worker.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dph.config import DataConfig
from dph.tasks.base import Prompt, Row
from dph.tasks.math import MathTask
from dph.tasks.math_equality import quick
from dph.tasks.math_extraction import extract
from dph.tasks.math_notation import number, read_quantity
from dph.tasks.math_parts import expressions
from dph.tasks.math_units import read_unit


def make_task(tmp_path, **settings_) -> MathTask:
    rows = [Row(tmp_path / "none.jsonl", 1, {"answer": "1"})]
    data = DataConfig(grader_timeout=20.0, **settings_)
    return MathTask(str(tmp_path / "none.jsonl"), {}, data, stored=rows)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("math"), grader_workers=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def by_value(tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("math"), math_match="value")
    yield made
    made.close()


def outcome(task: MathTask, gold: str, answer: str) -> str:
    """The verdict on an answer in a box."""
    return task.reward(Prompt(0, (), gold, {}), f"So \\boxed{{{answer}}}").outcome


RIGHT = {
    "numbers": r"""
27 ||| 27.0
27 ||| 27.
27 ||| 027
-5 ||| −5
-5 ||| –5
1000 ||| 1,000
1,000 ||| 1000
1000 ||| 1{,}000
1000 ||| 1\,000
1000 ||| 1 000
1,234,567 ||| 1\,234\,567
11,\! 111,\! 100 ||| 11111100
\frac{1}{2} ||| 0.5
1/2 ||| \dfrac{1}{2}
\frac14 ||| ¼
2\frac{3}{4} ||| 2¾
-\frac{1}{2} ||| \frac{-1}{2}
3\frac{1}{2} ||| \frac{7}{2}
3\frac{1}{2} ||| 3.5
11/4 ||| 2 3/4
\frac{6}{8} ||| \frac{3}{4}
\frac{1}{3} ||| 0.333333
0.333333 ||| \frac13
\frac{1}{3} ||| 0.\overline{3}
0.1\overline{6} ||| \frac{1}{6}
4.5e33 ||| 4.5\times 10^{33}
4.5e33 ||| 4.5 \cdot 10^{33}
1e-3 ||| 0.001
0.0000001 ||| 1\times 10^{-7}
5.6\times 10^{-8} ||| 0.000000056
5000000 ||| 5 million
5000 ||| 5 thousand
24 ||| 2\text{ dozen}
5 ||| \approx 5
18 ||| [18]
18 ||| (18)
""",
    "units": r"""
18 ||| 18 dollars
18 ||| 18\text{ dollars}
18 ||| 18 apples
2 ||| 2 eggs per day
2 ||| 2\,\mathrm{cm}
2 ||| 2\text{ cm}^2
2 ||| 2cm
90 ||| 90^\circ
60 ||| 60°
5 ||| 5^\circ C
30^\circ ||| 30 degrees
18 ||| \$18.00
32348 ||| \$32,\!348
18 ||| 18€
18 ||| £18
\$5 ||| 5 dollars
18\% ||| 18
18\% ||| 0.18
0.18 ||| 18 percent
50\% ||| \frac12
5\text{ cm} ||| 5
2 \text{ hours} ||| 2 hrs
10\text{ cm}^2 ||| 10 square centimeters
60 miles per hour ||| 60 \text{ mph}
2\sqrt{3}\text{ cm} ||| 2\sqrt{3}
2\sqrt{3} ||| 2\sqrt{3} cm
3\pmod 7 ||| 3
204_5 ||| 204
1010_2 ||| 1010_{\text{two}}
""",
    "words": r"""
\text{east} ||| East
\text{June 20} ||| June 20
\text{(B)} ||| B
BAC ||| \mathrm{BAC}
\text{no solution} ||| \emptyset
\emptyset ||| \{\}
""",
    "wrapping": r"""
18 ||| 18​
18 ||| `18`
18 ||| **18**
18 ||| $18$
18 ||| \textbf{18}
6x ||| 6·x
x^2 ||| x²
\infty ||| ∞
(-\infty,3) ||| (−∞,3)
(-\infty,1)\cup(3,\infty) ||| (−∞,1)∪(3,∞)
""",
    "lists, sets, tuples, intervals": r"""
(1,2) ||| \left(1, 2\right)
(1,2] ||| (1,2]
(2,1) ||| 2,1
(1e-3, 2) ||| (0.001, 2)
(-\infty,2)\cup(3,\infty) ||| (3,\infty)\cup(-\infty,2)
\{1,2,3\} ||| \{3,2,1\}
\{1,2\} ||| 2,1
1,2,3 ||| 3,2,1
$1$, $2$ ||| 2, 1
1,2 ||| 1 \text{ and } 2
1,2 ||| x=1 \text{ or } x=2
$(45,2),(-10,-9)$ ||| (-10,-9),(45,2)
\pm 2 ||| 2,-2
\{1\pm\sqrt{5},-2\} ||| \{-2, 1+\sqrt{5}, 1-\sqrt{5}\}
1+\sqrt{2}, 1-\sqrt{2} ||| 1 \pm \sqrt{2}
x > 3 ||| (3,\infty)
(3,\infty) ||| x>3
[-2,7] ||| -2 ≤ x ≤ 7
-2 \le x \le 7 ||| [-2,7]
(0,9)\cup(9,36) ||| (9,36)\cup(0,9)
""",
    "algebra": r"""
\sqrt{8} ||| 2\sqrt{2}
\sqrt2 ||| √2
\pi ||| 3.14159265
2^{10} ||| 1024
\sin 30^\circ ||| 0.5
(x+1)^2 ||| x^2+2x+1
10-4 n ||| $-4n+10$
x+1e-3 ||| x + 0.001
5 ||| x=5
5 ||| 2+3=5
x=5 ||| 5
y=2x+3 ||| y-2x=3
x > 3 ||| 3 < x
\begin{pmatrix}1&2\\3&4\end{pmatrix} ||| \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} ||| \begin{pmatrix}-1/3\\2/3\\5/3\end{pmatrix}
1+2i ||| 2i+1
\frac{\sqrt3-1}{2} ||| \frac{\sqrt3}{2}-\frac12
\frac{\sqrt{3}}{3} ||| \frac{1}{\sqrt3}
\frac{1}{2^{60}} ||| 2^{-60}
""",
}

WRONG = {
    "numbers": r"""
27 ||| 27.1
27 ||| -27
27 ||| 2.7
27 ||| 28
1000 ||| 1,00
\frac{1}{3} ||| 0.333
0.1 ||| 0.10000004
27 ||| 26.9999999
0 ||| 0.\overline{3}
0.\overline{3} ||| 0
2 3/4 ||| 5/4
1\,000 ||| 0
1\,000 ||| 10\,000
0.0000001 ||| 0.0000002
0.0000001 ||| 0
5.6\times 10^{-8} ||| 5.7\times 10^{-8}
4.5e33 ||| 4.6\times 10^{33}
123456789012345678901234567890 ||| 123456789012345678901234567891
1 ||| \frac{1}{0}
1 ||| \infty
""",
    "numbers side by side": r"""
42 ||| 12 30
18 ||| 5 6 7
12 ||| 1 2
12 ||| 1\,2
3 ||| 1 \text{ } 2
""",
    "what is left to compute": r"""
72 ||| 48+48/2
72 ||| \frac{144}{2}
70 ||| \binom{8}{4}
5050 ||| \sum_{n=1}^{100} n
1024 ||| 2^{10}
12 ||| 12!
\frac{3}{4} ||| \frac{6}{8}
2\sqrt{3} ||| \sqrt{3}+\sqrt{3}
6\pi ||| 2\pi+4\pi
11\sqrt2 ||| \sqrt{242}
\sqrt{13} ||| \sqrt{4+9}
6+9i ||| (1+2i)6-3i
[-2,7] ||| x^2-5x-4 \le 10
x>3 ||| 2x>6
""",
    "words behind a number": r"""
5 ||| 5xyz
3 ||| 3abc
5 ||| 5 hundreds
5 ||| 5 hundredths
5 ||| 5 dozens
2 ||| 2 gross
5 ||| 5 factorial
12 ||| 12 minus
18 ||| 18 million
18 ||| 18 percent of 50
5 ||| 5 is wrong
5 ||| 5\text{ is wrong}
5 ||| 5 \text{ or more}
5 ||| 5 or 6
5 ||| \text{not } 5
5 ||| five
5 ||| 5 \notacommand
x+1 ||| x+1 more
""",
    "another unit": r"""
5\text{ cm} ||| 5\text{ m}
2 \text{ hours} ||| 2 minutes
3\text{ p.m.} ||| 3\text{ a.m.}
\$5 ||| 5 cents
\$5 ||| €5
10\text{ cm}^2 ||| 10\text{ cm}
2\sqrt{3}\text{ cm} ||| 2\sqrt{3}\text{ m}
3\pmod 7 ||| 3 \pmod 8
204_5 ||| 204_6
1010_2 ||| 1010_3
204 ||| 204_5
""",
    "words": r"""
listen ||| silent
BAC ||| ABC
\text{Evelyn} ||| Evelyne
\text{June 20} ||| \text{June 21}
""",
    "lists, sets, tuples, intervals": r"""
(1,2) ||| (2,1)
(2,1) ||| 1,2
(1,2) ||| [1,2]
(1,2] ||| [1,2)
(1,2) ||| \{1,2\}
[-2,7] ||| -2 < x < 7
(45,2),(-10,-9) ||| (-10,-9),(45,-2)
1,2 ||| 1
1,2 ||| 1,2,2
1 ||| 1,2
x>3 ||| x\ge 3
\{\frac{1}{2^{60}}, 1\} ||| \{1, \frac{1}{2^{61}}\}
""",
    "algebra": r"""
\frac{\sqrt{2}}{10^{8}} ||| 0.00000001
\frac{1}{2^{60}} ||| \frac{1}{2^{61}}
\frac{1}{2004!} ||| \frac{1}{2006!}
\left(\frac{1}{2}\right)^{99} ||| \left(\frac{1}{2}\right)^{98}
\frac{x}{2^{60}} ||| \frac{x}{2^{61}}
x=5 ||| y=5
5 ||| 3=5
5 ||| 4=5
5 ||| 2+2=5
5x^2 ||| 5x^3
p - q ||| q - p
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} ||| \begin{pmatrix}-1/3\\1/3\end{pmatrix}
\frac{1}{2} ||| \badcommand{ \frac{1}{2} }
""",
}


def pairs_of(kinds: dict[str, str]) -> list:
    return [
        pytest.param(*line.split(" ||| "), id=f"{kind}: {line}")
        for kind, lines in kinds.items()
        for line in lines.strip().splitlines()
    ]


@pytest.mark.parametrize(("gold", "answer"), pairs_of(RIGHT))
def test_equal_answers_are_right(task, gold, answer):
    assert outcome(task, gold, answer) == "right"


@pytest.mark.parametrize(("gold", "answer"), pairs_of(WRONG))
def test_other_answers_are_wrong(task, gold, answer):
    assert outcome(task, gold, answer) == "wrong"


def test_the_gold_answer_is_passed_as_gold(task):
    # Not symmetric: for a bare gold value the answer may be an equation, of which the last side counts.
    assert outcome(task, "x^2+y^2=1", "1") == "wrong"
    assert outcome(task, "1", "x^2+y^2=1") == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("72", "48+48/2"), ("72", r"\frac{144}{2}"), ("70", r"\binom{8}{4}"), ("5050", r"\sum_{n=1}^{100} n")],
)
def test_a_setting_takes_what_is_left_to_compute(by_value, gold, answer):
    assert outcome(by_value, gold, answer) == "right"
    assert outcome(by_value, gold, f"1+{answer}") == "wrong"
    assert outcome(by_value, gold, "12 60") == "wrong"


@given(st.lists(st.integers(1, 999), min_size=2, max_size=4))
def test_numbers_side_by_side_are_neither_their_sum_nor_their_product_nor_one_number(numbers):
    answer = " ".join(map(str, numbers))
    product = 1
    for factor in numbers:
        product *= factor
    for gold in (sum(numbers), product, numbers[0], numbers[-1]):
        assert quick(str(gold), answer) is False


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_whole_numbers_are_equal_as_numbers_however_they_are_written(a, b):
    for form in (f"{a}", f"{a:,}", f"{a}.0", f"${a:,}$", f"{a:,}".replace(",", r"{,}"), f"{a:,}".replace(",", " ")):
        assert quick(str(b), form) is (a == b)


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_equal_as_fractions_however_they_are_written(a, b):
    if a.denominator == 1 or b.denominator == 1:
        return
    sign, (top, bottom) = "-" * (a < 0), abs(a).as_integer_ratio()
    for form in (
        f"{a.numerator}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{a.numerator}}}{{{bottom}}}",
    ):
        assert quick(f"{b.numerator}/{b.denominator}", form) is (a == b)


@settings(max_examples=100)
@given(st.text(max_size=30), st.text(alphabet=r"\{}()[]$ ,.=+-/^_123abxpm°½", max_size=30))
def test_no_text_breaks_what_runs_outside_the_workers(text, mathematics):
    for answer in (text, mathematics):
        number(answer)
        assert quick(answer, answer) in (True, None)
        assert quick("5", answer) in (True, False, None)
        extract(answer, strict=False)
        expressions(answer)


def test_a_repeating_decimal_is_its_fraction():
    assert number(r"2.1\overline{6}").value.as_integer_ratio() == (13, 6)
    assert number(r".\overline{142857}").value.as_integer_ratio() == (1, 7)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (" cm", "centimeter"),
        (r" \mathrm{cm}^2", "square centimeter"),
        (r"\text{ square feet}", "square foot"),
        (" km/h", "kilometer per hour"),
        (" boxes of pencils", "box of pencil"),
        (r"^\circ C", "degree celsius"),
        (r"\%", "percent"),
        (" p.m.", "pm"),
        ("", ""),
        (" or more", None),
        (" twelfths", None),
        ("x", None),
        (" per", None),
        ("!", None),
    ],
)
def test_a_unit_is_an_abbreviation_or_a_noun(text, unit):
    assert read_unit(text) == unit


def test_a_number_is_the_whole_of_a_text():
    for text in ("5 6", "5+6", "5!", "5^2", "5:6", "5, 6", "(5, 6)", r"5\pi", "5x", "x", "", "five", "5 (approx)"):
        assert read_quantity(text) is None, text
