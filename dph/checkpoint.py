"""Files that are whole or not there: each is written beside its place, synced and renamed. Checkpoints and run folders.

A checkpoint is RUN/checkpoints/step-N: a model folder in Hugging Face layout with trainer.safetensors (AdamW's
moments), state.json (the counters) and SHA256SUMS, as `sha256sum -c` reads it; one that does not hold what was written
is never loaded. Where the model folder was rounded to bf16, master_weights.safetensors holds the fp32 weights to go on
from. A run with adapters saves these in place of the model, in PEFT's layout (dph/adapter_folder.py).
What all this promises, and how it is tested: docs/reliability.md.
"""

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, ParamSpec

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from dph import distributed
from dph.adapter_folder import ADAPTER_WEIGHTS, read_adapter, save_adapter
from dph.config import Config, TrainConfig, to_toml
from dph.config_values import read_tables
from dph.errors import DataError, UserError, read_json
from dph.model import Decoder
from dph.model_folder import ADAPTER_CONFIG, INDEX, WEIGHTS, load_model, save_model
from dph.tokenizer import Tokenizer

# May differ when a run is continued: they change how long, how often or how fast, never what is computed.
FREE = r"eval\.|run\.(folder|device|threads|tensorboard)$|train\.(steps|shard|recompute|save_\w+|keep_\w+)$"
MASTER = "master_weights.safetensors"  # the fp32 weights, in a checkpoint whose model.safetensors was rounded
DAY = "chat_day.txt"  # in a run's folder
MADE_FROM = "made_from.json"  # in a run's folder, see dph/made_from.py
P = ParamSpec("P")
SUMS = "SHA256SUMS"
PARTS = {"trainer.safetensors", "state.json"}  # of every checkpoint; beside them stands a model or an adapter:
MODEL_PARTS = {WEIGHTS, "config.json"}


@dataclass
class State:
    """What a run's next step depends on beside weights and moments: counters, decisions, the best so far."""

    step: int = 0
    updates: int = 0  # optimizer steps taken
    drawn: int = 0  # prompts drawn
    rehearsed: int = 0  # stored answers drawn
    skipped: int = 0  # updates without a finite gradient
    skipped_in_a_row: int = 0
    best: float = -1.0  # pass@1 of the first evaluation set
    best_step: int = 0
    trust_sampler: bool | None = None  # whether its log-probabilities serve as pi_old's; None: not decided


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A place beside `path` for a file or folder; it takes the name once all is on the disk, else leaves what was."""
    partial = path.with_name(path.name + ".partial")
    _remove(partial)
    try:
        yield partial
        for each in [*partial.rglob("*"), partial]:
            _sync(each)
        if partial.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise _unwritten(path, error) from error
    finally:
        _remove(partial)


def _unwritten(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be written ({error}); make room, and the same command continues")


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


# ---- one of several processes writes --------------------------------------------------------------------------------


def is_writer() -> bool:
    """Whether this process writes the run's files: alone always, of several the leader."""
    return distributed.rank() == 0


@contextmanager
def writer_first() -> Iterator[None]:
    """The process that writes goes through the block first: the others find its files, and a mistake is said once."""
    if not is_writer():
        distributed.gather([])  # waits for the writer
    yield
    if is_writer():
        distributed.gather([])


def writer_only(function: Callable[P, None]) -> Callable[P, None]:
    """The function where files are written; elsewhere nothing."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        if is_writer():
            function(*args, **kwargs)

    return called


def as_the_writer_reads(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is none, as the writer finds it: it may write while others read."""
    found, *_ = distributed.gather([read_json(path, optional=True)])
    return found


@writer_only
def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the old one."""
    with _beside(path) as partial:
        partial.write_text(text, encoding="utf-8")


@writer_only
def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a whole safetensors file, or leaves the old one."""
    with _beside(path) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)


@writer_only
def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to a JSON Lines file and syncs it; a crash may cut the last line, which `read_log` drops."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritten(path, error) from error


@writer_only
def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file, or leaves the old one."""
    with _beside(path) as partial:
        partial.write_bytes(data)


@writer_only
def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes the files that `fill` puts into a folder as a whole folder, or leaves what was."""
    with _beside(path) as partial:
        fill(partial)


@writer_first()
def copy_folder(source: Path, target: Path) -> None:
    """Copies a folder's files into another, over those of the same name."""
    if is_writer():
        shutil.copytree(source, target, dirs_exist_ok=True)


def read_log(path: Path, column: str = "") -> list[dict[str, Any]]:
    """The rows that `append_rows` wrote, none where there is no file. DataError: no row, or one without `column`."""
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last piece is empty, or cut by a crash
    for number, line in enumerate(lines, start=1):
        try:
            rows.append({**json.loads(line)})
            _ = rows[-1][column] if column else None
        except (ValueError, TypeError, KeyError):
            raise DataError(path, number, "is no row of this log; mend or delete the file") from None
    return rows


@writer_first()
def open_run(config: Config) -> Path:
    """Makes the run's folder with its config.toml and takes its lock until this process ends.

    Raises: UserError where another process has the lock, or the folder holds another run: it names the keys.
    """
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    try:  # the number stays open on purpose; a lock of the process, so that it may open its run twice
        if is_writer():
            fcntl.lockf(os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process is at work here; wait, or choose another run.name") from None
    path, text = folder / "config.toml", to_toml(config)
    if not (folder / DAY).exists():
        write_text(folder / DAY, f"{date.today()}\n")
    if path.exists() and is_begun(folder):
        old, new = _flat(read_tables(path)), _flat(tomllib.loads(text))
        changed = [k for k in new if old.get(k) != new[k] and not re.match(FREE, k)]
        if changed:
            shown = ", ".join(f"{k} = {old.get(k)!r} there, {new[k]!r} here" for k in changed[:3])
            raise UserError(f"{folder}: holds another run ({shown}); choose another run.name or delete it")
    write_text(path, text)
    return folder


def is_begun(run: Path) -> bool:
    """Whether a run's folder holds work: more than what is there before a mistake in config or data is found."""
    return any(file.name not in ("lock", "config.toml", DAY, MADE_FROM) for file in run.iterdir())


def take_over_day(other: Path, run: Path) -> None:
    """Gives a run without work the day of another one, so that its chat templates write the same prompts."""
    if (other / DAY).exists() and not is_begun(run):
        write_text(run / DAY, f"{chat_day(other)}\n")


def chat_day(run: Path) -> date:
    """The day that chat templates take for today: that of the run's first start, or today where there is no run yet."""
    path = run / DAY
    try:
        return date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return date.today()
    except ValueError:
        raise UserError(f"{path}: should hold the day of the run's first start, such as 2026-01-31") from None


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def save_checkpoint(
    run: Path, model: Decoder, tokenizer: Tokenizer, optimizer: Optimizer, state: State, train: TrainConfig
) -> None:
    """Writes checkpoints/step-N, N = state.step, and deletes others than the newest train.keep_last and the best."""
    home, step = run / "checkpoints", state.step
    home.mkdir(exist_ok=True)
    weights = {name: _gathered(weight) for name, weight in model.named_parameters() if weight.requires_grad}
    moments = {
        f"{name}:{key}": _gathered(moment)
        for name, weight in model.named_parameters()
        for key, moment in optimizer.state.get(weight, {}).items()
    }
    if not is_writer():
        return
    with _beside(home / f"step-{step}") as partial:
        if model.base:
            save_adapter(model, weights, partial)
        else:
            _save_whole(model, weights, partial, train.save_dtype)
        tokenizer.save(partial)
        write_tensors(partial / "trainer.safetensors", moments)
        write_text(partial / "state.json", json.dumps(asdict(state), indent=1) + "\n")
        # Not that of adapter_config.json: where the base has moved, its new place is written there.
        files = [file for file in sorted(partial.iterdir()) if file.name != ADAPTER_CONFIG]
        sums = {file.name: _sha256(file) for file in files}
        write_text(partial / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    best = f"step-{state.best_step}" if train.keep_best else ""
    kept = [p for p in checkpoints(run) if _step(p) <= step][-train.keep_last :]  # what is newer was not whole
    for other in {*checkpoints(run), *home.glob("step-*.partial")} - {*kept, home / best}:
        _remove(other)


def _save_whole(model: Decoder, weights: Mapping[str, Tensor], folder: Path, dtype: str) -> None:
    """Writes the model's folder, rounded to bf16 where that is wanted; what rounding would lose stands beside."""
    rounds = dtype == "bf16" and model.head.dtype != torch.bfloat16
    save_model(model, folder, torch.bfloat16 if rounds else None, weights)
    if rounds:
        write_tensors(folder / MASTER, weights)
    # Tools that read every .safetensors of a folder, vLLM for one, keep to an index where there is one.
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)}
    write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint that is whole, after the reasons why newer ones are not. UserError: none of some is."""
    found = checkpoints(run)
    for folder in reversed(found):
        wrong = damage(folder)
        if not wrong:
            return folder
        print(f"{folder}: passed over, not as it was written: {', '.join(wrong)}", file=sys.stderr)
    if found:
        raise UserError(f"{run / 'checkpoints'}: none of {len(found)} is whole; delete the folder to train from step 0")
    return None


def damage(folder: Path) -> list[str]:
    """Names of a checkpoint's files that are missing or not as they were written; none where it is whole."""
    try:
        sums = dict(line.split()[::-1] for line in (folder / SUMS).read_text(encoding="utf-8").splitlines())
        parts = PARTS | ({ADAPTER_WEIGHTS} if (folder / ADAPTER_CONFIG).is_file() else MODEL_PARTS)
        return sorted({name for name in sums if _sha256(folder / name) != sums[name]} | parts - sums.keys())
    except (OSError, ValueError) as error:
        return [str(error)]


def refuse_damaged(folder: Path) -> None:
    """Raises a UserError where a folder is a checkpoint and not as it was written; any other folder passes."""
    if (folder / SUMS).is_file() and (wrong := damage(folder)):
        raise UserError(f"{folder}: not as it was written: {', '.join(wrong)}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@torch.no_grad()
def load_checkpoint(folder: Path, model: Decoder, optimizer: Optimizer) -> State:
    """Copies a checkpoint's weights and moments into place and returns its state."""
    if model.base:
        saved = read_adapter(folder, model)
    elif (folder / MASTER).is_file():
        saved = load_file(folder / MASTER)
    else:
        saved = load_model(folder, next(model.parameters()).dtype).state_dict()
    moments = load_file(folder / "trainer.safetensors")
    for name, weight in model.named_parameters():
        if name not in saved:  # of the frozen base
            continue
        weight.copy_(distributed.part_of(saved[name].to(weight.device), weight))
        prefix = f"{name}:"
        kept = {key.removeprefix(prefix): x for key, x in moments.items() if key.startswith(prefix)}
        if kept:
            optimizer.state[weight] = {key: _laid_out_as(weight, moment) for key, moment in kept.items()}
    return State(**read_json(folder / "state.json"))


def _gathered(part: Tensor) -> Tensor:
    """A weight or moment in full, in the leader's CPU memory; the other processes keep nothing of it."""
    sent = part.int() if part.dtype == torch.int16 else part  # neither gloo nor NCCL sends int16
    whole = distributed.whole(sent.detach()).to(part.dtype)
    return whole.cpu() if is_writer() else whole.new_empty(0)


def _laid_out_as(weight: Tensor, moment: Tensor) -> Tensor:
    """This process's part of a saved moment, on the weight's device, its numbers in memory as the weight's are."""
    if not moment.ndim:  # the count of steps
        return moment.to(weight.device)
    part = distributed.part_of(moment.to(weight.device), weight)
    return torch.empty_like(weight, dtype=moment.dtype).copy_(part)
