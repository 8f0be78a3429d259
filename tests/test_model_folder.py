"""What people have in a folder instead of a whole model: one line that names it, and the way out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dph.errors import UserError
from dph.model_folder import check_model_folder, load_model
from tests.helpers import tiny_folder

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


def put(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def quantised(**config: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))

    return change


def weights(**changes: torch.Tensor) -> Callable[[Path], None]:
    """Replaces or adds tensors; a keyword's double underscores stand for dots."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        old = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(old | {name.replace("__", "."): tensor for name, tensor in changes.items()}, path)

    return change


ADAPTER = put("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')
PARTS = ("config.json", "model.safetensors")
TOKENIZER = ("tokenizer.model", "tokenizer_config.json", "generation_config.json")
KINDS: dict[str, tuple[list[Callable[[Path], None]], str]] = {
    "pickle": (
        [rename("model.safetensors", "pytorch_model.bin")],
        r"holds pytorch_model\.bin, a pickle.*save_pretrained",
    ),
    "pickle in shards": (
        [rename("model.safetensors", "pytorch_model-00001-of-00001.bin"), put("pytorch_model.bin.index.json", "{}")],
        r"holds pytorch_model-00001-of-00001\.bin, a pickle",
    ),
    "Meta's pickle": ([remove(*PARTS), put("consolidated.00.pth", "")], r"holds consolidated\.00\.pth"),
    "GGUF": (
        [rename("model.safetensors", "qwen.Q4_K_M.gguf"), remove("config.json")],
        r"holds qwen\.Q4_K_M\.gguf, GGUF",
    ),
    "another name": ([rename("model.safetensors", "consolidated.safetensors")], r"holds consolidated\.safetensors"),
    "an adapter": (
        [remove(*PARTS), ADAPTER, put("adapter_model.safetensors", "")],
        r"an adapter of 'Qwen/Qwen2\.5-0\.5B', not a whole model; .*: python -m dph\.adapter merge .*model OUT",
    ),
    "an adapter without tokenizer": ([remove(*PARTS, *TOKENIZER), ADAPTER], r"an adapter of .*, not a whole model"),
    "an adapter beside whole weights": ([ADAPTER], r"an adapter of .* beside whole weights"),
    "AWQ": ([quantised(quantization_config={"quant_method": "awq", "bits": 4})], "names 'awq': quantised weights"),
    "GPTQ": ([quantised(quantization_config={"quant_method": "gptq"})], "names 'gptq': quantised weights"),
    "FP8": ([quantised(quantization_config={"quant_method": "fp8"})], "names 'fp8': quantised weights"),
    "bitsandbytes": (
        [quantised(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})],
        "names 'bitsandbytes': quantised weights",
    ),
    "GPTQ of old, named nowhere": (
        [weights(model__layers__0__mlp__up_proj__qweight=torch.ones(2, 2, dtype=torch.int32))],
        r"model\.safetensors: model\.layers\.0\.mlp\.up_proj\.qweight is int32: quantised weights",
    ),
    "FP8 named nowhere": (
        [weights(model__norm__weight=torch.ones(32).to(torch.float8_e4m3fn))],
        r"model\.norm\.weight is float8_e4m3fn: quantised weights",
    ),
    "pointer for weights": (
        [put("model.safetensors", POINTER)],
        r"model\.safetensors: is a git-lfs pointer.*git lfs pull",
    ),
    "pointer for a tokenizer": ([put("tokenizer.model", POINTER)], r"tokenizer\.model: is a git-lfs pointer"),
    "pointer for a config": ([put("config.json", POINTER)], r"config\.json: is a git-lfs pointer"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_whole_model_is_named_with_the_way_out(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path / "model")
    changes, named = KINDS[kind]
    for change in changes:
        change(folder)
    with pytest.raises(UserError, match=named) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_points_to_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        tiny_folder(tmp_path / "checkpoints" / f"step-{step}")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(UserError, match=rf"is the folder of a run.* is {tmp_path}/checkpoints/step-10$"):
            check_model_folder(folder)
    check_model_folder(tmp_path / "checkpoints" / "step-10")


def test_a_run_without_checkpoints_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="is the folder of a run that has no checkpoint yet"):
        check_model_folder(tmp_path)


def test_a_pickle_beside_whole_weights_does_no_harm(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    put("pytorch_model.bin", "")(folder)
    put("training_args.bin", "")(folder)
    load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_number_in_any_tensor_is_named_with_its_file(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    folder = tiny_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    good = load_file(path)
    for name, tensor in good.items():
        bad = tensor.clone()
        bad.view(-1)[len(bad) // 2] = value
        save_file(good | {name: bad}, path)
        with pytest.raises(UserError, match=rf"/model\.safetensors: {name} holds NaN or infinite values"):
            load_model(folder, dtype)


def test_of_shards_the_one_with_the_bad_tensor_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    shards = {name: f"model-0000{1 + (name == 'model.norm.weight')}-of-00002.safetensors" for name in tensors}
    for shard in set(shards.values()):
        save_file({name: tensor for name, tensor in tensors.items() if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UserError, match=r"/model-00002-of-00002\.safetensors: model\.norm\.weight holds NaN"):
        load_model(folder)
