"""A decoder in a folder of Hugging Face layout: config.json and model.safetensors, whole or in shards, in and out.

What is saved here, transformers and vLLM load. What people have in such a folder instead of a whole model (an adapter,
a pickle, quantised weights, a pointer of git-lfs, a run) is refused by name, with the way out.

Simplified: safetensors in floating point only.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dph.attention import Device
from dph.errors import UserError, read_json
from dph.model import Decoder
from dph.model_config import ModelConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # beside an adapter's weights, see dph/adapter_folder.py
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt"]  # what is fetched of a model
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by the names that a config has for them
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer begins; it is shorter than 1,024 bytes
OTHER_WEIGHTS = {  # files that hold weights in another format, and the way out
    "*.gguf": "GGUF, quantised for llama.cpp; take the folder that they were made from",
    "pytorch_model*.bin": "a pickle of PyTorch's; transformers converts it: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)",
    "*.pth": "a pickle of PyTorch's; take the model's release in Hugging Face layout",
    "*.h5": "TensorFlow's; take the model's release in safetensors",
    "*.msgpack": "Flax's; take the model's release in safetensors",
    "*.onnx": "ONNX; take the folder that they were made from",
    "*.safetensors": "of another name; a file must be called so, or be named by an index of shards",
}


def find_model(path: str, named: str = "model.path") -> Path:
    """The folder of a model: itself, or a hub name's download.

    Args:
        named: what gives the path, for the line that a UserError says where there is none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{named} = {path!r}: is a file; a model is a folder in Hugging Face layout")
    if folder.is_absolute() or path.startswith(".") or path.count("/") != 1:
        raise UserError(f"{named} = {path!r}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's own errors, the network's, the disk's: one advice for all
        why = f"is no folder and could not be fetched from the hub ({type(error).__name__})"
        raise UserError(f"{named} = {path!r} {why}; download it elsewhere and give its folder") from error


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Decoder:
    """The model of a folder, its weights in `dtype` on `device`.

    Raises: UserError where the folder holds something else, or a file is missing, damaged or asks for the unsupported.
    """
    folder = Path(folder)
    check_model_folder(folder)
    data = read_json(folder / "config.json")
    try:
        config = ModelConfig.from_dict(data)
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None
    with torch.device("meta"):
        model = Decoder(config)
    weights: dict[str, Tensor] = {}
    files: dict[str, Path] = {}  # where each tensor comes from
    for file in _weight_files(folder):
        found = read_tensors(file)
        weights |= found
        files |= dict.fromkeys(found, file)
    head = weights.pop("lm_head.weight", None) if config.tie_word_embeddings else None  # some store it all the same
    if head is not None and not torch.equal(head, weights.get("model.embed_tokens.weight", head)):
        raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")
    for name, weight in weights.items():
        loaded = weight.to(device, dtype, copy=True)  # out of the mapped file, which may change
        if not loaded.sum(dtype=torch.float32).isfinite():  # the sum is ten times as fast as a look at each
            raise UserError(f"{files[name]}: {name} holds NaN or infinite values in {dtype}")
        weights[name] = loaded
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # names what is missing, unexpected or of another shape, each on a line
        raise UserError(f"{folder}: {' '.join(str(error).split()):.500}") from None
    return model


def save_model(
    model: Decoder,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors. Atomic is the caller's part.

    Args:
        dtype: of the file; by default the weights' own.
        weights: the model's, by name, where it does not hold them itself: those of a sharded one are gathered first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = model.state_dict() if weights is None else weights
    saved = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in found.items()}
    config = {key: value for key, value in model.config.source.items() if key != "torch_dtype"}
    config["dtype"] = str(saved["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    save_file(saved, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_model_folder(folder: Path, adapter: bool = False) -> None:
    """Raises a UserError where a folder holds something else than a whole model: it says what, and the way out.

    It looks at names and first bytes only, so that it may come before anything is loaded.

    Args:
        adapter: whether an adapter alone is right, too (dph/adapter_folder.py).
    """
    _refuse_a_run(folder)
    names = sorted(file.name for file in folder.glob("*") if file.is_file())
    for name in names:
        if _is_pointer(folder / name):
            raise UserError(f"{folder / name}: is a git-lfs pointer, not the file; `git lfs pull` there fetches it")
    whole = WEIGHTS in names or INDEX in names
    if ADAPTER_CONFIG in names:
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if whole:
            raise UserError(
                f"{folder}: holds an adapter of {base!r} ({ADAPTER_CONFIG}) beside whole weights, and other tools "
                "would load both; merge it, or move it to a folder of its own"
            )
        if adapter:
            return
        raise UserError(
            f"{folder}: holds an adapter of {base!r}, not a whole model; this makes one: "
            f"python -m dph.adapter merge {folder} OUT"
        )
    if whole:
        return
    for pattern, kind in OTHER_WEIGHTS.items():
        for file in sorted(folder.glob(pattern)):
            raise UserError(f"{folder}: instead of {WEIGHTS} it holds {file.name}, {kind}")


def _refuse_a_run(folder: Path) -> None:
    """The folder of a run, or its checkpoints/, is no model, but the newest step in it is one."""
    if (folder / "config.json").is_file():
        return
    steps: list[Path] = []
    for home in (folder, folder / "checkpoints"):
        steps += [step for step in home.glob("step-*") if step.name.removeprefix("step-").isdigit()]
    if steps:
        newest = max(steps, key=lambda step: int(step.name.removeprefix("step-")))
        raise UserError(f"{folder}: is the folder of a run, not a model; its newest checkpoint is {newest}")
    if (folder / "config.toml").is_file():
        raise UserError(f"{folder}: is the folder of a run that has no checkpoint yet; a model has a config.json")


def _is_pointer(file: Path) -> bool:
    if file.stat().st_size >= 1024:
        return False
    with file.open("rb") as opened:
        return opened.read(len(LFS)) == LFS


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or the shards that the index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    shards = read_json(folder / INDEX).get("weight_map")
    files = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else ["/"]
    if any(Path(file).name != file for file in files):
        raise UserError(f"{folder / INDEX}: weight_map must name a file of this folder for each tensor")
    return [folder / file for file in files]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors as they are stored, still in the mapped file."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not readable (weights must be safetensors): {error}") from None
    for name, weight in found.items():
        if weight.dtype not in FLOATS:
            kind = str(weight.dtype).removeprefix("torch.")
            raise UserError(
                f"{file}: {name} is {kind}: quantised weights are not supported; "
                "take the folder that the model was quantised from"
            )
    return {name: weight for name, weight in found.items() if not name.endswith("rotary_emb.inv_freq")}  # Llama 2's
