"""The lecture runs from its first cell to its last, prints what it has stored, and what its prose says of that holds.

`python -m tests.test_lecture` runs it and stores its outputs anew.
"""

import re
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

LECTURE = Path(__file__).parent.parent / "examples" / "lecture.ipynb"
LONGEST = 180  # seconds
NUMBER = r"-?\d+\.\d+"


def run(notebook: Any) -> None:
    """Executes every cell in place."""
    resources = {"metadata": {"path": LECTURE.parent}}
    client = NotebookClient(notebook, timeout=LONGEST, kernel_name="python3", resources=resources, record_timing=False)
    client.coalesce_streams = True
    client.execute()


def printed(notebook: Any) -> str:
    """What all cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def pictures(notebook: Any) -> int:
    """How many pictures the cells show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture(scope="module")
def lecture() -> tuple[Any, float]:
    """The notebook just executed, and the seconds that it took."""
    notebook, start = nbformat.read(LECTURE, as_version=4), time.monotonic()
    run(notebook)
    return notebook, time.monotonic() - start


def test_the_lecture_takes_little_time(lecture: tuple[Any, float]) -> None:
    assert lecture[1] < LONGEST


def test_the_stored_outputs_are_what_it_prints(lecture: tuple[Any, float]) -> None:
    stored = nbformat.read(LECTURE, as_version=4)
    texts = [printed(notebook) for notebook in (stored, lecture[0])]
    words = [re.sub(r"\s+", " ", re.sub(NUMBER, "#", text)) for text in texts]
    numbers = [[float(x) for x in re.findall(NUMBER, text)] for text in texts]
    assert words[0] == words[1]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02), "sampled curves may differ a little between machines"
    assert pictures(stored) == pictures(lecture[0]) >= 4


def test_what_section_6_says_of_its_curves_holds(lecture: tuple[Any, float]) -> None:
    rows = {}
    for line in printed(lecture[0]).splitlines():
        if "->" in line:
            rows[line[:14].strip()] = [float(x) for x in re.findall(NUMBER, line[14:])]
    assert list(rows) == ["grpo", "rkl, eta 0.1", "rkl, eta 1", "dph_f, eta 1", "dph_js, eta 4"]
    seen_1, seen_8, trained = ({name: values[i] for name, values in rows.items()} for i in (1, 3, 6))
    before = rows["grpo"][2]
    assert seen_8["grpo"] < 0.7 * before
    assert seen_8["grpo"] < seen_8["rkl, eta 0.1"] < seen_8["dph_f, eta 1"] < seen_8["rkl, eta 1"]
    assert seen_8["dph_f, eta 1"] > 0.9 * before
    assert max(trained, key=lambda name: trained[name]) in ("dph_f, eta 1", "dph_js, eta 4")
    assert trained["rkl, eta 1"] < trained["grpo"] < trained["dph_f, eta 1"]
    assert max(seen_1, key=lambda name: seen_1[name]) == "grpo"
    assert seen_8["dph_f, eta 1"] == pytest.approx(seen_8["dph_js, eta 4"], abs=0.02)


def test_what_is_stored_is_small() -> None:
    assert LECTURE.stat().st_size < 400_000


if __name__ == "__main__":
    made = nbformat.read(LECTURE, as_version=4)
    run(made)
    nbformat.write(made, LECTURE)
    print(printed(made))
