"""The house rules: imports run downward, files and functions stay short, the mathematics imports nothing but torch."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEVELS = [
    {"errors", "distributed", "text"},
    {"chat_template", "token_settings", "divergences", "model_config"},
    {"attention", "drawing"},
    {"model"},
    {"tokenizer", "model_folder", "adapter", "packing", "graphs"},
    {"config_values", "adapter_folder"},
    {"config", "plain"},
    {"tasks", "losses", "rollouts", "checkpoint", "optimizer"},
    {"sampler", "scoring", "prompts", "miniature_base", "metrics"},
    {"answering", "updates", "budget"},
    {"made_from"},
    {"presampling", "evaluation", "collector", "objective"},
    {"cli"},
    {"plots", "merge"},
    {"trainer", "inspect", "compare"},
]
# Each imports only those before it, and dph/.
STUDY = [
    *("words", "families", "skills", "candidates"),
    *("plan", "statistics", "results", "tables", "forgetting", "report", "measure", "plots", "run"),
]
SOURCES = [
    *sorted((ROOT / "dph").rglob("*.py")),
    *sorted((ROOT / "study").glob("*.py")),
    *(ROOT / f"{name}.py" for name in ("train", "presample", "evaluate")),
]


def level(module: str) -> int:
    return next(i for i, names in enumerate(LEVELS) if module in names)


def imported(path: Path, package: str = "dph") -> set[str]:
    """Names of a package's modules that a file imports, e.g. {"model", "tasks"}."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not is_command(node)]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == package:
            names = [f"{package}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
    return found


def is_command(node: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`, which nobody imports: it may call the file of its command."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def test_imports_run_downward() -> None:
    for path in (ROOT / "dph").glob("*.py"):
        if path.stem != "__init__":
            for name in imported(path):
                assert level(name) < level(path.stem), f"{path.name} imports {name}"
    for path in (ROOT / "dph" / "tasks").glob("*.py"):
        assert imported(path) <= {"errors", "text", "config", "tasks"}, path.name


def test_few_files_know_of_several_processes() -> None:
    knowing = {path.stem for path in (ROOT / "dph").rglob("*.py") if "distributed" in imported(path)}
    assert knowing == {"answering", "checkpoint", "cli", "updates"}


def test_the_study_uses_dph_and_never_the_reverse() -> None:
    for path in SOURCES:
        before = STUDY[: STUDY.index(path.stem)] if path.parent.name == "study" and path.stem in STUDY else []
        assert imported(path, "study") <= set(before), path.name


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
