"""The project can be installed, cited and checked by others: its metadata is whole and names what is there."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


def test_a_wheel_holds_the_library_whole_and_asks_for_what_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "dph", tmp_path / "dph", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "made", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "made").glob("dph_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("dph/")}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "dph").rglob("*") if path.suffix in (".py", ".html")}
    assert held == there
    asked = email.message_from_string(metadata).get_all("Requires-Dist", [])
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("#")[0].strip() for line in lines]
    assert asked == [line for line in wanted if line]


def test_the_citation_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "title", "message", "authors", "license"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert paper["title"].startswith("The Choice of Divergence")
    assert [author["family-names"] for author in paper["authors"]][::11] == ["Li", "Qi"]
    assert paper["url"] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_continuous_integration_runs_what_contributors_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
