"""Files that are whole or not there: each is written beside its place, synced and renamed. Checkpoints and run folders.

A checkpoint is RUN/checkpoints/step-N: a model folder in Hugging Face layout with trainer.safetensors (AdamW's moments)
and state.json (the counters). The folder gets its name only when all of it is on the disk.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from dph.config import Config, to_toml
from dph.errors import UserError
from dph.model import Decoder, load_model, save_model
from dph.tokenizer import Tokenizer

# May differ when a run is continued: they change how long, how often or how fast, never what is computed.
FREE: tuple[str, ...] = (
    "run.folder",
    "run.device",
    "run.threads",
    "run.tensorboard",
    "train.save_every",
    "train.keep_last",
    "eval.",
)
FREE += ("train.steps",)


def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the old one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a whole safetensors file, or leaves the old one."""
    partial = path.with_name(path.name + ".partial")
    save_file(dict(tensors), partial)
    partial.replace(path)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to a JSON Lines file; a crash may cut the last line, which readers drop."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def open_run(config: Config) -> Path:
    """Makes the run's folder with its config.toml; a folder that holds another run is a UserError naming the keys."""
    folder = config.run_folder
    path, text = folder / "config.toml", to_toml(config)
    if path.exists():
        old, new = (_flat(tomllib.loads(t)) for t in (path.read_text(encoding="utf-8"), text))
        changed = [k for k in new if old.get(k) != new[k] and not k.startswith(FREE)]
        if changed:
            shown = ", ".join(f"{k} = {old.get(k)!r} there, {new[k]!r} here" for k in changed[:3])
            raise UserError(f"{folder}: holds another run ({shown}); choose another run.name or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return folder


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def save_checkpoint(
    run: Path, model: Decoder, tokenizer: Tokenizer, optimizer: Optimizer, state: Mapping[str, Any], keep: int
) -> Path:
    """Writes checkpoints/step-N, N = state["step"], and deletes all but the newest `keep`."""
    folder = run / "checkpoints" / f"step-{state['step']}"
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(model, partial)
    tokenizer.save(partial)
    names = {id(p): name for name, p in model.named_parameters()}
    moments = {f"{names[id(p)]}:{key}": x for p, kept in optimizer.state.items() for key, x in kept.items()}
    write_tensors(partial / "trainer.safetensors", moments)
    write_text(partial / "state.json", json.dumps(state, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    found = [p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[5:]))


@torch.no_grad()
def load_checkpoint(folder: Path, model: Decoder, optimizer: Optimizer) -> dict[str, Any]:
    """Copies a checkpoint's weights and moments into place and returns its state."""
    saved = load_model(folder, next(model.parameters()).dtype)
    for weight, loaded in zip(model.parameters(), saved.parameters(), strict=True):
        weight.copy_(loaded)
    moments = load_file(folder / "trainer.safetensors")
    for name, weight in model.named_parameters():
        prefix = f"{name}:"
        kept = {key.removeprefix(prefix): x for key, x in moments.items() if key.startswith(prefix)}
        if kept:
            optimizer.state[weight] = {key: x.to(weight.device) for key, x in kept.items()}
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return state
