"""The house rules: imports run downward, files and functions stay short, the mathematics imports nothing but torch."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEVELS = [
    {"errors", "distributed", "text"},
    {"chat_template", "token_settings", "divergences", "model"},
    {"tokenizer", "model_folder"},
    {"config"},
    {"tasks", "losses", "rollouts", "checkpoint"},
    {"sampler"},
    {"answering", "metrics"},
    {"presampling", "evaluation", "collector"},
    {"plots", "cli"},
    {"trainer"},
    {"study_plan"},
    {"study_measure", "study_report"},
    {"study_plots"},
    {"study"},
]
SOURCES = [*sorted((ROOT / "dph").rglob("*.py")), *(ROOT / f"{name}.py" for name in ("train", "presample", "evaluate"))]
MAY_ALSO_IMPORT = {"miniature_base": {"model", "model_folder", "tokenizer"}, "prompts": {"tokenizer"}}  # of dph/tasks


def level(module: str) -> int:
    return next(i for i, names in enumerate(LEVELS) if module in names)


def imported(path: Path) -> set[str]:
    """Names of the project's modules that a file imports, e.g. {"model", "tasks"}."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        found |= {name.split(".")[1] for name in names if name and name.startswith("dph.")}
    return found


def test_imports_run_downward() -> None:
    for path in (ROOT / "dph").glob("*.py"):
        if path.stem != "__init__":
            for name in imported(path):
                assert level(name) < level(path.stem), f"{path.name} imports {name}"
    for path in (ROOT / "dph" / "tasks").glob("*.py"):
        allowed = {"errors", "text", "config", "tasks"} | MAY_ALSO_IMPORT.get(path.stem, set())
        assert imported(path) <= allowed, path.name


def test_commands_that_train_nothing_never_import_the_trainer() -> None:
    assert not any("trainer" in imported(ROOT / name) for name in ("presample.py", "evaluate.py"))


def test_the_objective_imports_torch_alone() -> None:
    for name in ("divergences", "losses"):
        for node in ast.walk(ast.parse((ROOT / "dph" / f"{name}.py").read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert module.split(".")[0] in ("", "torch", "collections", "dataclasses", "functools", "typing", "dph"), (
                module
            )
    assert imported(ROOT / "dph" / "losses.py") == {"divergences"}


def test_files_and_functions_are_short() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        most = 150 if path.stem == "distributed" else 400
        assert len(lines) < most, f"{path.name} has {len(lines)} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length < 60, f"{path.name}: {node.name} has {length} lines"


def test_commands_are_thin() -> None:
    for name in ("train.py", "presample.py", "evaluate.py"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < 80, name
