"""Makes a whole model of an adapter: python -m dph.adapter merge RUN_OR_CHECKPOINT OUT [--dtype bf16]

OUT becomes a folder in Hugging Face layout: the base's weights with the adapter in them, W + s B A, and the tokenizer.
Of a run the newest checkpoint is taken. A folder that PEFT made elsewhere is merged, too, where it is plain LoRA.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from dph.adapter_folder import base_folder, load_merged
from dph.checkpoint import checkpoints, newest_checkpoint, refuse_damaged, write_folder
from dph.cli import fail, to_the_end
from dph.errors import UserError
from dph.model import Decoder
from dph.model_folder import ADAPTER_CONFIG, check_model_folder, save_model
from dph.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def merge(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Writes OUT. UserError: there is no adapter to merge, its base is not there, or OUT is taken."""
    folder = source
    if checkpoints(source):
        folder = newest_checkpoint(source) or source
    if not folder.is_dir():
        raise UserError(f"{source}: no such folder")
    check_model_folder(folder, adapter=True)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder}: holds no adapter ({ADAPTER_CONFIG}); there is nothing to merge")
    if out.exists():
        raise UserError(f"{out}: is already there; name a new folder")
    refuse_damaged(folder)
    model = load_merged(folder)
    tokenizer = load_tokenizer(folder if _has_tokenizer(folder) else base_folder(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_folder(out, partial(_fill, model, tokenizer, dtype))


def _has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies beside an adapter, as in a checkpoint; else it is its base's."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def _fill(model: Decoder, tokenizer: Tokenizer, dtype: torch.dtype, folder: Path) -> None:
    save_model(model, folder, dtype)
    tokenizer.save(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m dph.adapter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail  # type: ignore[method-assign]  # its own prints the usage, too
    parser.add_argument("what", choices=["merge"], help="the one command there is")
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a folder that holds an adapter")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of the weights in OUT (fp32)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(sys.argv[1:])
    to_the_end(lambda: merge(given.source, given.out, DTYPES[given.dtype]), given.debug)
    print(f"model: {given.out}")


if __name__ == "__main__":
    main()
