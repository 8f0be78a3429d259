"""An adapter in a folder of PEFT's layout, in and out: adapter_config.json and adapter_model.safetensors.

What is saved here, PEFT and vLLM load. What PEFT has made elsewhere is read where it is plain LoRA on layers that have
adapters here; a variant that computes another formula is refused by name.

An adapter means nothing without its own base, and half of one is another model. So the file of the weights carries a
hash of the base's (PEFT's does not), and the layers in it must be those that adapter_config.json names.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dph.adapter import adapters, add_adapters, merged
from dph.attention import Device
from dph.errors import UserError, read_json
from dph.model import Decoder
from dph.model_folder import ADAPTER_CONFIG, check_model_folder, find_model, load_model, read_tensors

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before a weight's name
BASE_SHA256 = "base_sha256"  # among the metadata of the file of the weights
# Keys under which PEFT computes something else than W x + s B A x; without them each is empty, null or false.
VARIANTS = ["alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "kasa_config"]
VARIANTS += ["layer_replication", "lora_bias", "modules_to_save", "monteclora_config", "rank_pattern"]
VARIANTS += ["target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "use_rslora"]
STARTS = [None, True, False, "gaussian", "orthogonal"]  # of A and B; other ways change W, too


def save_adapter(model: Decoder, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Writes the adapters of a model in PEFT's layout. Atomic is the caller's part.

    Args:
        weights: A and B of each of the model's adapters, by name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layers = adapters(model)
    rank, alpha = _settings(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    saved = {PREFIX + name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(saved, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", BASE_SHA256: model.base_sha256})


def _settings(model: Decoder) -> tuple[int, float]:
    """r and alpha of a model's adapters."""
    layer = next(iter(adapters(model).values()))
    rank = layer.lora_A.out_features
    return rank, layer.scale * rank


def read_adapter(folder: Path, model: Decoder) -> dict[str, Tensor]:
    """A and B of a folder, by the names that they have in the model; of layers that have an adapter there.

    Raises: UserError where a weight is missing, damaged, of another shape, or of a layer that has no adapter here; or
        where the model is another one than the adapter was trained on.
    """
    file = folder / ADAPTER_WEIGHTS
    found = read_tensors(file)
    trained = {PREFIX + name: weight for name, weight in model.named_parameters() if ".lora_" in name}
    for name, weight in found.items():
        if name not in trained:
            raise UserError(f"{file}: {name} belongs to no linear layer of {model.base}'s layers; merge it with peft")
        if name.replace(".lora_A.", ".lora_B.") not in found or name.replace(".lora_B.", ".lora_A.") not in found:
            raise UserError(f"{file}: {name} has no counterpart: A and B go together")
        if weight.shape != trained[name].shape:
            shapes = f"{list(weight.shape)}, not {list(trained[name].shape)}"
            raise UserError(f"{file}: {name} is {shapes}; it was made for another base or rank")
        if not weight.isfinite().all():
            raise UserError(f"{file}: {name} holds NaN or infinite values")
    if not found:
        raise UserError(f"{file}: holds no weights")
    _check_layers(folder, model, {name.removeprefix(PREFIX).partition(".lora_")[0] for name in found})
    _check_base(file, model)
    return {name.removeprefix(PREFIX): weight for name, weight in found.items()}


def _check_layers(folder: Path, model: Decoder, found: set[str]) -> None:
    """Raises a UserError unless the layers `found` among the weights are those that adapter_config.json names."""
    named = _named_layers(folder, list(adapters(model)))
    for layer in sorted(named ^ found):
        if layer in named:
            raise UserError(f"{folder / ADAPTER_WEIGHTS}: lacks {layer}, which {ADAPTER_CONFIG} names; save it again")
        raise UserError(f"{folder / ADAPTER_WEIGHTS}: holds {layer}, which {ADAPTER_CONFIG} does not name")


def _named_layers(folder: Path, layers: list[str]) -> set[str]:
    """Those of `layers` that adapter_config.json gives an adapter, by PEFT's rules."""
    path = folder / ADAPTER_CONFIG
    config = _read_config(folder)
    wanted = config["target_modules"]
    excluded = config.get("exclude_modules") or []
    numbers = config.get("layers_to_transform")  # of the layers that have adapters; none given: all have
    if isinstance(numbers, int):
        numbers = [numbers]
    try:
        chosen = {layer for layer in layers if _matches(layer, wanted) and not _matches(layer, excluded)}
        return {layer for layer in chosen if not numbers or int(layer.split(".")[2]) in numbers}
    except (re.error, TypeError) as error:
        keys = "target_modules, exclude_modules or layers_to_transform"
        raise UserError(f"{path}: {keys} cannot be read ({error})") from None


def _matches(layer: str, pattern: str | list[str]) -> bool:
    """Whether a pattern of PEFT's means this layer: ends of names, a regular expression, or all linear layers."""
    if pattern == "all-linear":
        return True
    if isinstance(pattern, str):
        return re.fullmatch(pattern, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in pattern)


def _check_base(file: Path, model: Decoder) -> None:
    """Raises a UserError where the weights of the model's base are not those that the adapter was trained on."""
    with safe_open(file, "pt") as opened:
        trained_on = (opened.metadata() or {}).get(BASE_SHA256)
    if trained_on and trained_on != model.base_sha256:  # PEFT does not say
        raise UserError(
            f"{file}: was trained on other weights than those of {model.base!r}; "
            f"write where its own base lies into {ADAPTER_CONFIG} (base_model_name_or_path)"
        )


@torch.no_grad()
def load_merged(folder: str | Path, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Decoder:
    """The model of a folder in `dtype`: a whole one, or the base that an adapter names with the adapter merged into it.

    Raises: UserError where the folder, or the base, holds neither or cannot be read.
    """
    folder = Path(folder)
    check_model_folder(folder, adapter=True)
    if not (folder / ADAPTER_CONFIG).is_file():
        return load_model(folder, dtype, device)
    config = _read_config(folder)
    name = str(config["base_model_name_or_path"])
    model = load_model(base_folder(folder), dtype, device)
    add_adapters(model, config["r"], config["lora_alpha"], name)
    for part, weight in read_adapter(folder, model).items():
        model.get_parameter(part).copy_(weight)
    return merged(model, dtype)


def base_folder(folder: Path) -> Path:
    """Where the base of an adapter lies; fetched from the hub if need be."""
    name = _read_config(folder)["base_model_name_or_path"]
    return find_model(str(name), f"{folder / ADAPTER_CONFIG}: base_model_name_or_path")


def _read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of plain LoRA. UserError: it is something else."""
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{path}: r is {rank!r}; it must be a positive int")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise UserError(f"{path}: lora_alpha is {alpha!r}; it must be a positive number")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path}: base_model_name_or_path should name the base's folder, or its name on the hub")
    targets = config.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise UserError(f"{path}: target_modules is {targets!r}; it should name the layers that have an adapter")
    only: dict[str, list[Any]] = {"peft_type": ["LORA"], "bias": [None, "none"], "init_lora_weights": STARTS}
    only |= {key: [None, False, {}, []] for key in VARIANTS}
    for key, right in only.items():
        if config.get(key) not in right:
            raise UserError(f"{path}: {key} is {config.get(key)!r}: only plain LoRA is supported; merge it with peft")
    return config
