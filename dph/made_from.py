"""What a run, a partition, an evaluation and recorded rollouts were made from, compared before anything goes on.

`made_from` gives one value for each thing that answers and rewards depend on:

| name | value |
| --- | --- |
| model | hash of the weights, in float32, and of the shape that config.json gives them |
| tokenizer | hash of its file, its vocabulary and its special tokens |
| end tokens | their ids |
| prompts | hash of the prompts' tokens, the chat template with its variables written out in them |
| gold answers | hash of what the grader compares with |
| databases, grader | hash of what else the grader reads, where a task says so (`Task.content`) |
| settings | those of the config that matter, as JSON |
| rollouts | of a run: whether they are sampled, or those that another run has recorded |
| evaluation sets | of a run: for each set that is looked at while training, one hash of all its data, as JSON |

A partition and an evaluation keep these values in their reports, a run in RUN/made_from.json.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dph.answering import Policy
from dph.checkpoint import MADE_FROM, checkpoints, is_begun, write_text, writer_first
from dph.config import Config
from dph.errors import UserError, read_json
from dph.prompts import PromptSet

SHOWN = 3  # changed settings or sets that a message names
ASKED = ("prompts", "gold answers", "databases", "grader")  # what was asked and how it was judged
OF_THE_RUN = ("rollouts", "evaluation sets")  # what recorded rollouts do not depend on


def made_from(policy: Policy, data: PromptSet, settings: Mapping[str, Any], model: str = "") -> dict[str, str]:
    """The values of the table above, for answers of `policy` to `data` under `settings`.

    Args:
        model: what `model_hash` gives for the policy, where it is known: reading all weights takes its time.
    """
    return {
        "model": model or model_hash(policy),
        "tokenizer": policy.tokenizer.content(),
        "end tokens": json.dumps(policy.tokenizer.end_ids),
        **_data_hashes(data),
        "settings": json.dumps(settings, sort_keys=True),
    }


def made_from_sets(sets: Sequence[PromptSet]) -> dict[str, str]:
    """The value "evaluation sets", for those that are looked at while training."""
    hashes = {data.task.name: _hashed(_data_hashes(data)) for data in sets}
    return {"evaluation sets": json.dumps(hashes, sort_keys=True)}


def _data_hashes(data: PromptSet) -> dict[str, str]:
    tokens = [(prompt.index, prompt.tokens) for prompt in data.prompts]
    golds = [(prompt.index, data.task.record(prompt)) for prompt in data.prompts]
    return {"prompts": _hashed(tokens), "gold answers": _hashed(golds), **data.task.content()}


def model_hash(policy: Policy) -> str:
    """SHA-256 of the weights as they are now, and of what config.json says about how they are used."""
    shape = asdict(replace(policy.model.config, source={}))
    return _hashed([policy.weights_hash(), shape])


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---- settings ----------------------------------------------------------------------------------------------------


def answer_settings(config: Config) -> dict[str, Any]:
    """What every answer and its reward depend on.

    sampling.max_rows and graphs are among them: they set the shapes of batches, and in fp32 about one answer in a
    thousand is another one in batches of other shapes, in bf16 about half.
    """
    data = config.data
    return {
        **asdict(config.sampling),
        "seed": config.run.seed,
        "dtype": config.run.dtype,
        "judge": [data.strict, data.math_match, data.sql_match, data.sql_variants, data.grader_timeout],
    }


def run_settings(config: Config) -> dict[str, Any]:
    """What a run's rollouts depend on, and how they are read back.

    Not [loss]: comparing losses on the same rollouts is what they are recorded for. Not the shapes of batches: what is
    read back is not sampled again. That a run itself goes on with all its settings, `checkpoint.open_run` sees to.
    """
    train = config.train
    found = answer_settings(config)
    del found["max_rows"], found["graphs"]
    return {
        **found,
        "prompts_per_step": train.prompts_per_step,
        "responses_per_prompt": train.responses_per_prompt,
        "dynamic_sampling": train.dynamic_sampling,
        "overlong_buffer": train.overlong_buffer,
    }


# ---- comparing ---------------------------------------------------------------------------------------------------


def changed(found: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
    """What differs, by name, e.g. "prompts and gold answers"; empty where nothing does."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    shown = [_named(name, found, wanted) for name in names]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _named(name: str, found: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
    """The name; settings with the keys that changed, evaluation sets with the sets."""
    if name not in ("settings", "evaluation sets"):
        return name
    try:
        there = dict(json.loads(found[name]))
    except (KeyError, TypeError, ValueError):  # not written by this program, or by an older one
        return name
    here = json.loads(wanted.get(name, "{}"))
    keys = [key for key in {**here, **there} if there.get(key) != here.get(key)]
    if name == "evaluation sets":
        return f"{name} ({', '.join(keys[:SHOWN])})"
    shown = ", ".join(f"{key} = {there.get(key)!r} there, {here.get(key)!r} here" for key in keys[:SHOWN])
    return f"settings ({shown})"


def refuse_other(where: str | Path, found: Mapping[str, Any], wanted: Mapping[str, str], way_out: str) -> None:
    """Raises a UserError that names what differs between what `where` was made from and what is here now."""
    if names := changed(found, wanted):
        raise UserError(f"{where}: made with other {names}; {way_out}")


@writer_first()  # else another process could begin the run before the writer has looked
def check_run(run: Path, made: Mapping[str, str]) -> None:
    """Writes RUN/made_from.json at a run's first start; later it must be the same.

    Raises: UserError where the run was made from something else, or has checkpoints and does not say from what.
    """
    path = run / MADE_FROM
    if path.exists() and is_begun(run):
        refuse_other(run, read_json(path), made, "delete it, or change run.name")
        return
    if checkpoints(run):
        raise UserError(f"{run}: has no {MADE_FROM}, so its data cannot be checked; delete it, or change run.name")
    write_text(path, json.dumps(made, indent=1) + "\n")


def check_source(recorded: Path, run: Path) -> None:
    """Raises a UserError where a folder holds no recorded rollouts, or is the run that would read them."""
    if not (recorded / "rollouts").is_dir():
        raise UserError(f"--rollouts-from {recorded}: holds none; record them with --train.record_rollouts=true")
    if recorded.resolve() == run.resolve():
        raise UserError(f"--rollouts-from {recorded}: is this run itself; choose another run.name")


def check_recorded(recorded: Path, made: Mapping[str, str]) -> None:
    """Raises a UserError unless the rollouts recorded in this run's folder answer what this run would ask."""
    where = f"--rollouts-from {recorded}"
    path = recorded / MADE_FROM
    if not path.exists():
        raise UserError(f"{where}: has no {MADE_FROM}, so its rollouts cannot be checked; record them again")
    found = {name: value for name, value in read_json(path).items() if name not in OF_THE_RUN}
    refuse_other(where, found, made, "record them again, or train as that run did but for [loss]")
