"""What the study compares: study.toml, read and checked, and the runs that it asks for.

A *method* is a config with overrides and, where it has one, a swept key. A *setting* is a method at one value of that
key. A *run* is a setting at one seed. `pick` turns methods' names into settings, and `make_run` a setting and a seed
into a run. A run knows all settings that decide its result, so that `changed` can tell whether an older result was made
with the same.

Simplified: one key is swept, the others stand still; seeds are 0, 1, 2, ...
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dph.config import Config, load_config
from dph.config_values import checked_section, key, nearest, read_tables
from dph.errors import UserError
from dph.tasks.base import parse_source

BASE = "base"  # the name under which the initial policy is measured
SECTIONS = ("study", "methods", "sets")
# Keys that change where and how often a run writes, never what it computes.
FREE = re.compile(r"run\.(name|folder|device|tensorboard)|train\.(save_every|keep_\w+)|eval\.(final|samples)")
# The base is not trained: only these keys decide its measurement.
OF_THE_BASE = re.compile(r"(model|data|sampling|eval|sets)\.|run\.(seed|dtype|threads)")
# Keys that older results know by another name.
RENAMED = {"presample.top_k": "presample.stored_top_k", "loss.overlong_buffer": "train.overlong_buffer"}
GONE = {"loss.level"}  # always "token" in the results that have it


@dataclass(frozen=True)
class StudyTable:
    """[study] what all runs share."""

    config: str = key("configs/miniature.toml", "config of the base's own measurement")
    seeds: int = key(4, "seeds of each setting, 0, 1, 2, ...", low=1, high=1000)
    workers: int = key(2, "runs at a time, one thread each", low=1, high=64)
    runs: str = key("runs/study", "folder of the runs, their logs and the bases")
    report: str = key("docs/study", "folder of the tables and pictures; runs/ in it holds one JSON file a run")
    shared: tuple[str, ...] = key((), "overrides of every config, as section.key=value")
    against: tuple[str, ...] = key((BASE,), "methods from which the tables subtract the others")
    equal_kl: str = key("", "the method at whose KL to the base the others are compared; none: no such table")


@dataclass(frozen=True)
class MethodTable:
    """[methods.NAME] one method."""

    config: str = key("", "its config file")
    overrides: tuple[str, ...] = key((), "further overrides, as section.key=value")
    sweep: str = key("", "the key that is swept, as section.key")
    values: tuple[float, ...] = key((), "its values")
    default: bool = key(False, "whether it is run where nothing is picked")


@dataclass(frozen=True)
class SetTable:
    """[sets.NAME] what every run is measured on: questions to answer (`source`), or texts to read (`text`)."""

    source: str = key("", "questions: a source, as in data.eval")
    samples: int = key(64, "answers to each question, beside a greedy one", low=1)
    text: str = key("", "in place of questions, a JSON Lines file of texts: how likely are they?")
    field: str = key("text", "the field of a row that holds the text")
    rows: int = key(200, "how many rows of the file are read", low=1)
    title: str = key("", "its name in tables and pictures; default: NAME")
    in_domain: bool = key(False, "whether it is the one set whose questions are like those of training")
    chooses: bool = key(False, "whether it is the one set that chooses each method's value, and shows in no table")
    graded: bool = key(True, "whether answers can be right; if not, KL alone is reported")
    kl: bool = key(False, "whether KL to the base is measured on the policy's own answers")
    forms: bool = key(False, "whether a question's different right answers are counted")
    votes: bool = key(False, "whether answers are grouped by what they say, for majority votes")
    seeds: int = key(0, "measured at seeds 0 ... SEEDS-1 alone; 0: at every seed", low=0)

    @property
    def measured(self) -> str:
        """All that decides what is measured, in words; a result that was measured otherwise is stale."""
        if self.text:
            return f"{self.text}, {self.field}, {self.rows} rows"
        marks = ", kl" * self.kl + ", forms" * self.forms + ", votes" * self.votes
        return f"{self.source}, {self.samples} samples{marks}"

    def at(self, seed: int) -> bool:
        """Whether it is measured at a seed."""
        return self.seeds == 0 or seed < self.seeds


Setting = tuple[str, float | None]  # a method's name and the value of its swept key, None where it has none


@dataclass(frozen=True)
class Study:
    """study.toml, checked. All paths in it are seen from where the command is run."""

    file: Path
    table: StudyTable
    methods: dict[str, MethodTable]
    sets: dict[str, SetTable]

    @property
    def runs(self) -> Path:
        """The folder of the runs."""
        return Path(self.table.runs)

    @property
    def in_domain(self) -> str:
        """The name of the set whose questions are like those of training."""
        return next(name for name, each in self.sets.items() if each.in_domain)

    @property
    def chooser(self) -> str:
        """The name of the set that chooses each method's value."""
        return next(name for name, each in self.sets.items() if each.chooses)

    @property
    def results(self) -> Path:
        """The folder of the JSON files, one a run."""
        return Path(self.table.report) / "runs"


@dataclass(frozen=True)
class Run:
    """One setting at one seed: what train.py is called with, and all settings that decide its result, flat."""

    id: str  # METHOD-KEYVALUE-seedS, the name of its folder, log and JSON file
    method: str
    sweep: str
    value: float | None
    seed: int
    command: list[str]  # arguments of train.py
    config: Config = field(repr=False)
    settings: dict[str, Any] = field(repr=False)


def load_study(path: Path) -> Study:
    """Reads study.toml. UserError: names the file, the key, the value found and what would be right."""
    tables = read_tables(path)
    try:
        for name in tables:
            if name not in SECTIONS:
                raise UserError(f"unknown section [{name}]{nearest(name, SECTIONS)}")
        table: StudyTable = checked_section(StudyTable, "study", tables.get("study", {}))
        methods = {name: _method(name, values) for name, values in tables.get("methods", {}).items()}
        for named in (*table.against, table.equal_kl):
            if named not in ("", BASE, *methods):
                raise UserError(f"[study] names {named!r}, which is no method{nearest(named, methods)}")
        return Study(path, table, methods, _sets(tables.get("sets", {})))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _method(name: str, values: Any) -> MethodTable:
    method: MethodTable = _checked(MethodTable, f"methods.{name}", values)
    if name in (BASE, "logs") or not re.fullmatch(r"\w+", name):  # runs/logs lies beside the runs' folders
        raise UserError(f"methods.{name}: a method's name should be letters, digits and _, not {BASE} or logs")
    if not method.config:
        raise UserError(f"methods.{name}.config should name its config file, e.g. configs/miniature_grpo.toml")
    if bool(method.sweep) != bool(method.values):
        raise UserError(f"methods.{name}: sweep = {method.sweep!r} and values = {list(method.values)} go together")
    return method


def _sets(tables: Mapping[str, Any]) -> dict[str, SetTable]:
    sets: dict[str, SetTable] = {}
    for name, values in tables.items():
        each: SetTable = _checked(SetTable, f"sets.{name}", values)
        if not re.fullmatch(r"\w+", name):
            raise UserError(f"sets.{name}: a set's name should be letters, digits and _")
        if bool(each.source) == bool(each.text):
            raise UserError(f"sets.{name}: source = {each.source!r} or text = {each.text!r} should be given, not both")
        if each.source:
            parse_source(each.source)
        for mark in ("in_domain", "chooses", "kl", "forms", "votes"):
            if each.text and getattr(each, mark):
                raise UserError(f"sets.{name}.{mark} = true should be false: a text has no answers")
        if not each.graded and (each.in_domain or each.chooses or each.votes or not each.kl):
            raise UserError(f"sets.{name}.graded = false should stand at a set that is there for kl = true alone")
        if each.seeds and (each.in_domain or each.chooses):
            raise UserError(f"sets.{name}.seeds = {each.seeds} should be 0: this set is needed at every seed")
        sets[name] = replace(each, title=each.title or name)
    for mark in ("in_domain", "chooses"):
        marked = [name for name, each in sets.items() if getattr(each, mark)]
        if len(marked) != 1:
            raise UserError(f"sets: {mark} = true should stand at one set; it stands at {', '.join(marked) or 'none'}")
    return sets


def _checked(kind: Any, name: str, values: Any) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{name} = {values!r} should be a table")
    return checked_section(kind, name, values)


def pick(study: Study, names: Sequence[str] | None) -> list[Setting]:
    """The settings of the methods named, each once, in the study's order; None: the default methods'.

    Raises: UserError for a name that is no method's.
    """
    for name in names or ():
        if name not in study.methods:
            raise UserError(f"METHODS: {name!r} is no method of {study.file}{nearest(name, study.methods)}")
    chosen: list[Setting] = []
    for name, method in study.methods.items():
        if method.default if names is None else name in names:
            chosen += [(name, value) for value in sorted(set(method.values))] or [(name, None)]
    if not chosen:
        raise UserError(f"METHODS names nothing to run; {study.file} has {', '.join(study.methods)}")
    return chosen


def make_run(study: Study, setting: Setting, seed: int) -> Run:
    """The run of a setting (or of `(BASE, None)`) at a seed. UserError: the config does not take these settings."""
    name, value = setting
    method = MethodTable(config=study.table.config) if name == BASE else study.methods[name]
    overrides = [*study.table.shared, *method.overrides]
    run_id = f"{name}-seed{seed}"
    if value is not None:
        overrides.append(f"{method.sweep}={value:g}")
        run_id = f"{name}-{method.sweep.rpartition('.')[2]}{value:g}-seed{seed}"
    overrides += [f"run.name={run_id}", f"run.folder={study.runs}", f"run.seed={seed}"]
    arguments = [f"--{override}" for override in overrides]
    try:
        config = load_config(method.config, arguments)
    except UserError as error:
        raise UserError(f"{study.file}, {name}: {error}") from None
    settings = flat(config)
    for set_name, each in study.sets.items():
        if each.at(seed):
            settings[f"sets.{set_name}"] = each.measured
    if name == BASE:
        settings = {k: v for k, v in settings.items() if OF_THE_BASE.match(k)}
    settings = {k: v for k, v in settings.items() if not FREE.fullmatch(k)}
    return Run(run_id, name, method.sweep, value, seed, [method.config, *arguments], config, settings)


def flat(config: Config) -> dict[str, Any]:
    """{"section.key": value} of every key, as JSON holds it."""
    found: dict[str, Any] = {}
    for section, table in dataclasses.asdict(config).items():
        for name, value in table.items():
            found[f"{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The names of the settings in which two results differ, sorted."""
    before, now = _todays(old), _todays(new)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _todays(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under today's names; a key that a result does not know did then what its default does now."""
    kept = {name: value for name, value in settings.items() if name not in GONE}
    return flat(Config()) | {RENAMED.get(name, name): value for name, value in kept.items()}
