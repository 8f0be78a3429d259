"""The documents keep their word: links lead somewhere, functions and tests that they name exist."""

import importlib
import re
from pathlib import Path

import pytest

from dph.config import Config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_to_files_that_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_named_tests_exist(path: Path) -> None:
    for name, test in re.findall(r"`(?:tests/)?(test_\w+\.py)::(test_\w+)`", path.read_text(encoding="utf-8")):
        assert f"def {test}(" in (ROOT / "tests" / name).read_text(encoding="utf-8"), f"{name}::{test}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_named_functions_exist(path: Path) -> None:
    modules = "|".join(p.stem for p in (ROOT / "dph").glob("*.py") if p.stem != "__init__")
    for module, name in re.findall(rf"`({modules})\.(?!py|png|json)(\w+)`", path.read_text(encoding="utf-8")):
        is_key = hasattr(getattr(Config(), module, None), name)  # `model` is also a section of a config
        assert is_key or hasattr(importlib.import_module(f"dph.{module}"), name), f"{module}.{name}"


EQUATIONS = re.findall(
    r"^\| (E\d+) \|.*\| ((?:`\w+\.[\w.]+`(?:, )?)+) \| `(test_\w+\.py)::(test_\w+)` \|$",
    (ROOT / "docs" / "equations.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", EQUATIONS, ids=lambda row: f"{row[0]} {row[1]}")
def test_each_function_of_an_equation_says_which_one_it_is(row: tuple[str, str, str, str]) -> None:
    number, functions, _, _ = row
    for name in re.findall(r"`([\w.]+)`", functions):
        module, *parts = name.split(".")
        found = importlib.import_module(f"dph.{module}")
        for part in parts:
            found = getattr(found, part)
        assert re.search(rf"\b{number}\b", found.__doc__ or ""), name


def test_every_equation_has_a_function_and_a_test_of_its_file_in_the_readme() -> None:
    assert {row[0] for row in EQUATIONS} == {f"E{number}" for number in range(1, 12)}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for number, file in re.findall(r"^\| (E\d+) \|.*\[(test_\w+\.py)\]", readme, re.MULTILINE):
        assert file in {row[2] for row in EQUATIONS if row[0] == number}, f"{number}: {file}"


def test_every_document_is_reached_from_the_readme() -> None:
    reached = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"docs/{p.name}" not in reached] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_configs_and_commands_named_exist(path: Path) -> None:
    for name in re.findall(r"(?:configs|benchmarks|examples)/[\w]+\.(?:toml|py|sh)", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name
