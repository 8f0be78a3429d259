"""What the study compares: study.toml read and checked, and the runs that it asks for.

A *method* is a config with overrides and, where it has one, a swept key; a *setting* is a method at one value of that
key; a *run* is a setting at one seed. Groups are named sets of settings. `pick` turns names into settings, `make_run` a
setting and a seed into a run with its resolved settings, by which a result made with others is recognised (`changed`).

Simplified: one key is swept, the others stand still; seeds are 0, 1, 2, ...
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dph.config import Config, checked_section, key, load_config, nearest, read_tables
from dph.errors import UserError

BASE = "base"  # the name under which the initial policy is measured
RESERVED = (BASE, "presample", "logs")  # what else lies in the folder of the runs
ROLES = ("in_domain", "cross_domain", "out_of_domain", "validation")  # of the evaluation sets
# What changes where and how often a run writes, never what it computes.
FREE = re.compile(r"run\.(name|folder|device|tensorboard)|train\.(save_every|keep_\w+)|eval\.(final|samples)")
OF_THE_BASE = re.compile(r"(model|data|sampling|sets)\.|eval\.(?!final|samples)|run\.(seed|dtype|threads)")


@dataclass(frozen=True)
class StudyTable:
    """[study] what all runs share."""

    config: str = key("configs/miniature.toml", "config of the base's own measurement")
    seeds: int = key(4, "seeds of each setting, 0, 1, 2, ...", low=1, high=1000)
    workers: int = key(2, "runs at a time, one thread each", low=1, high=64)
    runs: str = key("runs/study", "folder of the runs, their logs and the bases")
    report: str = key("docs/study", "folder of the tables and pictures; runs/ in it holds one JSON a run")
    shared: tuple[str, ...] = key((), "overrides of every config, as section.key=value")


@dataclass(frozen=True)
class MethodTable:
    """[methods.NAME] one method."""

    config: str = key("", "its config file, beside the study's file")
    overrides: tuple[str, ...] = key((), "further overrides, as section.key=value")
    sweep: str = key("", "the key that is swept, as section.key")
    values: tuple[float, ...] = key((), "its values")
    default: bool = key(False, "whether it is run where nothing is picked")


@dataclass(frozen=True)
class SetTable:
    """[sets.ROLE] one evaluation set."""

    source: str = key("", "a source, as in data.eval")
    samples: int = key(64, "answers to each question, beside a greedy one", low=1)


Pick = tuple[str, float | None]  # a method's name and the value of its swept key, None where it has none


@dataclass(frozen=True)
class Study:
    """study.toml, checked. Paths of configs are beside the file, all others where the command is run."""

    file: Path
    table: StudyTable
    methods: dict[str, MethodTable]
    groups: dict[str, list[Pick]]
    sets: dict[str, SetTable]

    @property
    def runs(self) -> Path:
        """The folder of the runs."""
        return Path(self.table.runs)

    @property
    def results(self) -> Path:
        """The folder of the JSON files."""
        return Path(self.table.report) / "runs"


@dataclass(frozen=True)
class Run:
    """One setting at one seed: what train.py is called with, and all settings that decide its result, flat."""

    method: str
    sweep: str
    value: float | None
    seed: int
    file: Path
    overrides: list[str]
    config: Config = field(repr=False)
    settings: dict[str, Any] = field(repr=False)

    @property
    def id(self) -> str:
        """METHOD-KEYVALUE-seedS, the name of its folder, log and JSON file."""
        return run_id(self.method, self.sweep, self.value, self.seed)

    @property
    def uses_partition(self) -> bool:
        """Whether its training needs the partition into D_pef and D_exp."""
        return self.config.loss.divergence != "none" and self.config.loss.samples != "own"


def run_id(method: str, sweep: str, value: float | None, seed: int) -> str:
    """See `Run.id`."""
    swept = "" if value is None else f"-{sweep.rpartition('.')[2]}{value:g}"
    return f"{method}{swept}-seed{seed}"


def load_study(path: Path) -> Study:
    """Reads study.toml. UserError: names the file, the key, the value found and what would be right."""
    tables = read_tables(path)
    for name in tables:
        if name not in ("study", "methods", "groups", "sets"):
            raise UserError(f"{path}: unknown section [{name}]{nearest(name, ('study', 'methods', 'groups', 'sets'))}")
    try:
        table = checked_section(StudyTable, "study", tables.get("study", {}))
        methods = {name: _method(name, values) for name, values in tables.get("methods", {}).items()}
        sets = {
            role: checked_section(SetTable, f"sets.{role}", _table(f"sets.{role}", tables.get("sets", {}).get(role)))
            for role in ROLES
        }
        for role in tables.get("sets", {}).keys() - set(ROLES):
            raise UserError(f"unknown key sets.{role}{nearest(role, ROLES)}")
        groups = {name: _group(name, values, methods) for name, values in tables.get("groups", {}).items()}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return Study(path, table, methods, groups, sets)


def _table(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"{name} = {values!r} should be a table")
    return values


def _method(name: str, values: Any) -> MethodTable:
    method: MethodTable = checked_section(MethodTable, f"methods.{name}", _table(f"methods.{name}", values))
    if name in RESERVED or not re.fullmatch(r"\w+", name):
        raise UserError(f"methods.{name}: a method's name should be letters, digits and _, not {' or '.join(RESERVED)}")
    if bool(method.sweep) != bool(method.values):
        raise UserError(f"methods.{name}: sweep = {method.sweep!r} and values = {list(method.values)} go together")
    return method


def _group(name: str, entries: Any, methods: Mapping[str, MethodTable]) -> list[Pick]:
    """A list of methods, or a table from methods to values that stand in for their own."""
    if name in methods:
        raise UserError(f"groups.{name}: a method has that name")
    if not isinstance(entries, list | dict):
        raise UserError(f'groups.{name} = {entries!r} should be a list of methods, e.g. ["dph_f", "dph_js"]')
    found: list[Pick] = []
    for method in entries:
        if method not in methods:
            raise UserError(f"groups.{name}: unknown method {method!r}{nearest(str(method), methods)}")
        table = methods[method]
        if isinstance(entries, dict):
            table = _method(method, {**dataclasses.asdict(table), "values": entries[method]})
        found += _settings(method, table)
    return found


def _settings(name: str, method: MethodTable) -> list[Pick]:
    return [(name, value) for value in method.values or (None,)]


def pick(study: Study, names: Sequence[str] | None) -> list[Pick]:
    """The settings of methods and groups by name, each once, in the study's order; None: the default methods'.

    Raises: UserError for a name that is neither.
    """
    chosen: list[Pick] = []
    for name in [n for n, m in study.methods.items() if m.default] if names is None else names:
        if name in study.groups:
            chosen += study.groups[name]
        elif name in study.methods:
            chosen += _settings(name, study.methods[name])
        else:
            known = [*study.methods, *study.groups]
            raise UserError(f"METHODS: {name!r} is no method or group of {study.file}{nearest(name, known)}")
    if not chosen:
        raise UserError(f"METHODS names nothing to run; {study.file} has {', '.join([*study.methods, *study.groups])}")
    order = list(study.methods)
    return sorted(set(chosen), key=lambda setting: (order.index(setting[0]), setting[1] or 0.0))


def make_run(study: Study, setting: Pick, seed: int) -> Run:
    """The run of a setting (or of `(BASE, None)`) at a seed. UserError: the config does not take these settings."""
    name, value = setting
    method = study.methods.get(name, MethodTable(config=study.table.config))
    file = study.file.parent / method.config
    swept = [] if value is None else [f"{method.sweep}={value:g}"]
    place = [f"run.name={run_id(name, method.sweep, value, seed)}", f"run.folder={study.runs}", f"run.seed={seed}"]
    overrides = [f"--{each}" for each in (*study.table.shared, *method.overrides, *swept, *place)]
    try:
        config = load_config(file, overrides)
    except UserError as error:
        raise UserError(f"{study.file}, {name}: {error}") from None
    settings = flat(config) | {f"sets.{r}": f"{s.source}, {s.samples} samples" for r, s in study.sets.items()}
    wanted = {k: v for k, v in settings.items() if (OF_THE_BASE.match(k) if name == BASE else not FREE.fullmatch(k))}
    return Run(name, method.sweep, value, seed, file, overrides, config, wanted)


def flat(config: Config) -> dict[str, Any]:
    """{"section.key": value} of every key, as JSON holds it."""
    tables = dataclasses.asdict(config)
    return {f"{s}.{k}": list(v) if isinstance(v, tuple) else v for s, t in tables.items() for k, v in t.items()}


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys of `new` settings that `old` ones were made with otherwise.

    A key that did not exist then is no change as long as it has its default.
    """
    defaults = flat(Config())
    same_names = [k for k in old if old[k] != new.get(k)]
    return same_names + [k for k in new.keys() - old.keys() if k not in defaults or new[k] != defaults[k]]
