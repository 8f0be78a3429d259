"""What the commands share: the command line, errors in one line, the device, the model and its data."""

import argparse
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from dph import distributed
from dph.adapter import add_adapters, check_rank
from dph.adapter_folder import load_merged
from dph.answering import Policy
from dph.checkpoint import chat_day, refuse_damaged, writer_first
from dph.config import Config, describe, load_config
from dph.errors import UserError, read_json
from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.model_folder import DTYPES, check_model_folder, find_model, load_model
from dph.tasks import Task, load_task
from dph.tokenizer import load_tokenizer


def config_argument(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Declares CONFIG."""
    parser.add_argument("config", help="a TOML file, e.g. configs/quickstart.toml", **options)


def budget_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --budget and what goes with it."""
    parser.add_argument("--budget", action="store_true", help="print the memory that the run would take, and end")
    parser.add_argument("--gpu-memory", type=float, default=0, metavar="GB", help="--budget: what makes it fit")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="--budget: those of torchrun")


def run_command(
    main: Callable[[Config, argparse.Namespace], None],
    description: str,
    declare: Callable[[argparse.ArgumentParser], None] = config_argument,
) -> None:
    """Parses what `declare` declares and --section.key=value, calls `main`; a user's mistake is one line and exit 2."""
    parser = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s CONFIG [options] [--section.key=value ...]",
        epilog="keys, their defaults and meanings:\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail  # type: ignore[method-assign]  # its own prints the usage, too
    declare(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments, overrides = parser.parse_known_intermixed_args()
    work = distributed.processes()(lambda: main(load_config(arguments.config, overrides), arguments))
    to_the_end(work, arguments.debug)


def to_the_end(work: Callable[[], None], debug: bool) -> None:
    """Calls `work`; a user's mistake is one line and exit 2, Ctrl-C and SIGTERM are exit 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what is half-written is cleared away
    try:
        work()
    except (UserError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
        full = _out_of_memory(error)
        if isinstance(error, RuntimeError) and not full:
            raise  # a mistake of this program's
        if debug:
            traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            print("\ninterrupted; the same command continues where this one stopped", file=sys.stderr)
            sys.exit(130)
        lower = "sampling.max_rows, sampling.max_new_tokens or train.microbatch_tokens"
        fail(f"out of memory; lower {lower}" if full else str(error))


def _out_of_memory(error: BaseException) -> bool:
    """On a CPU PyTorch raises no class of its own for it."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


class StopSignals:
    """Catches the first SIGINT or SIGTERM, for a loop to save at the end of its step; the second stops at once."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> "StopSignals":
        self.old = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True
        tqdm.write("stopping after this step; once more stops at once")

    def anywhere(self) -> bool:
        """Whether any of the run's processes was told to stop: all of them hear the same."""
        return any(distributed.gather([self.received]))


def fail(message: str) -> NoReturn:
    """One line on standard error, exit code 2."""
    print(f"error: {' '.join(message.split())[:600]}", file=sys.stderr)
    sys.exit(2)


def set_up(config: Config) -> torch.device:
    """Threads, denormals and the device."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.set_flush_denormal(True)  # AdamW's moments decay into denormal numbers, which CPUs handle slowly
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = 'cuda', but PyTorch finds no CUDA device; take auto or cpu")
    return torch.device("cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu")


@writer_first()
def resolve_model(path: str, config: Config) -> Path:
    """The folder of a model: itself, the miniature's base (trained if need be), or a hub name's download."""
    if path == "miniature":
        from dph.miniature_base import build_base

        return build_base(Path(config.run.folder), config.run.seed, config.run.threads)
    return find_model(path)


def read_shape(config: Config) -> ModelConfig:
    """The shape of the config's model; its config.json alone is read."""
    if config.model.path == "miniature":
        raise UserError("--budget: the miniature, 0.6 million weights, fits everywhere; give --model.path=FOLDER")
    folder = find_model(config.model.path)
    try:
        return ModelConfig.from_dict(read_json(folder / "config.json"))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def load_policy(path: str, config: Config, device: torch.device, may_be_adapter: bool = False) -> Policy:
    """Model and tokenizer of `path`, in model.dtype on `device`; what a glance can refuse is, before weights load.

    Args:
        may_be_adapter: whether the folder may hold an adapter alone, as a checkpoint does: it is merged into its base.
    """
    folder = resolve_model(path, config)
    check_model_folder(folder, may_be_adapter)
    refuse_damaged(folder)
    tokenizer = load_tokenizer(folder, config.data.template, chat_day(config.run_folder))
    dtype = DTYPES[config.model.dtype]
    model = load_merged(folder, dtype, device) if may_be_adapter else load_model(folder, dtype, device)
    if tokenizer.vocab_size > model.config.vocab_size:  # the other way round is padding
        sizes = f"{tokenizer.vocab_size} tokens in the tokenizer, {model.config.vocab_size} in the model"
        raise UserError(f"{folder}: {sizes}")
    if config.presample.stored_top_k > model.config.vocab_size - 1:
        size = model.config.vocab_size
        most = f"{size - 1}: {folder} has {size} tokens"
        raise UserError(f"presample.stored_top_k = {config.presample.stored_top_k} should be at most {most}")
    check_rank(model, config.model.adapter_rank)
    if config.model.compile:
        model.compile_layers()
    model.recompute = config.train.recompute
    return Policy(model, tokenizer, folder)


def prepare_training(policy: Policy, config: Config, device: torch.device) -> Decoder | None:
    """Puts the config's adapters on the initial policy; returns pi_ref where the loss needs it in memory, else None.

    With adapters pi_ref is the policy's own model, see `adapter.as_reference`; without them it is a second one.
    """
    path, model = config.model.path, config.model
    if model.adapter_rank:
        on_the_hub = path != "miniature" and not Path(path).expanduser().is_dir()
        base = path if on_the_hub else str(policy.folder.resolve())
        add_adapters(policy.model, model.adapter_rank, model.adapter_alpha, base, config.run.seed)
    if not config.loss.needs_reference:
        return None
    if model.adapter_rank:
        return policy.model
    return load_policy(path, config, device).model.requires_grad_(False)


@writer_first()
def open_task(source: str, config: Config) -> Task:
    """The task of a source, its data read and checked."""
    return load_task(source, config.data, config.run.seed, Path(config.run.folder))
