"""How weights in bf16 may learn, compared with fp32: python -m benchmarks.bf16_weights [--seeds 3] [--steps 200]

For each seed fp32 trains GRPO on the miniature and records its rollouts. Every rule then trains on those same rollouts,
so that what differs is the rule alone. All but `fp32` hold the weights in bf16, compute in bf16, and sum gradients and
keep moments in fp32. They differ in what becomes of the digits that a step's rounding takes from a weight:

    halves      kept exactly, in the 16 bits beside the weight (dph/optimizer.py)
    remainder   kept as a bf16 number beside the weight, as Kahan's sum does
    random      lost, but rounding up or down is drawn with the odds that make it right on average
    nearest     lost

The table gives the mean over the seeds and, in brackets, half of its 95 % interval (Student's t):

    moved        the length of all weights' change, by that of fp32
    off          the distance between the two changes, by the length of fp32's
    nats         KL from fp32's last policy on the last step's rollouts, a token; fp32's row: from the base
    reward       mean reward of 4 answers to each of 100 prompts of miniature:test
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import dph.optimizer
from benchmarks.measure import machine
from dph.answering import EVALUATE, Policy, acting, answer, autocast, sampling_settings, score_rollouts
from dph.checkpoint import open_run
from dph.cli import load_policy, open_task, set_up
from dph.config import Config, load_config
from dph.evaluation import kl_to_base, load_base
from dph.miniature_base import build_base
from dph.model import Decoder
from dph.model_folder import load_model, save_model
from dph.prompts import PromptSet, tokenize
from dph.rollouts import unpack
from dph.trainer import Data, Trainer

SPLIT, JOIN = dph.optimizer.split, dph.optimizer.join
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % point of Student's t for the mean of so many


def remainder(whole: Tensor) -> tuple[Tensor, Tensor]:
    """What is left is rounded to bf16; int16 is only where it is kept."""
    weight = whole.to(torch.bfloat16)
    return weight, (whole - weight.float()).to(torch.bfloat16).view(torch.int16)


def with_remainder(weight: Tensor, rest: Tensor) -> Tensor:
    return weight.float() + rest.view(torch.bfloat16).float()


def random(whole: Tensor) -> tuple[Tensor, Tensor]:
    """A uniform number of 16 bits is added before the lower half is cut off."""
    bits = whole.view(torch.int32)
    drawn = torch.randint_like(bits, 1 << 16)
    return ((bits + drawn) >> 16).to(torch.int16).view(torch.bfloat16), torch.zeros_like(bits, dtype=torch.int16)


def nearest(whole: Tensor) -> tuple[Tensor, Tensor]:
    return SPLIT(whole)[0], torch.zeros_like(whole, dtype=torch.int16)


RULES: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "fp32": (SPLIT, JOIN),  # neither is called
    "halves": (SPLIT, JOIN),
    "remainder": (remainder, with_remainder),
    "random": (random, JOIN),
    "nearest": (nearest, JOIN),
}


def settings(rule: str, seed: int, folder: Path, wanted: argparse.Namespace) -> Config:
    kind = "fp32" if rule == "fp32" else "bf16"
    sizes = {
        "model.dtype": kind, "run.dtype": kind, "run.folder": str(folder), "run.name": f"{rule}-{seed}",
        "run.seed": seed, "run.threads": 1, "model.path": wanted.model, "train.steps": wanted.steps,
        "train.prompts_per_step": 8, "train.passes": 1, "train.record_rollouts": rule == "fp32", "optim.lr": wanted.lr,
        "train.eval_every": 0, "train.save_every": 0,
    }  # fmt: skip
    return load_config("configs/miniature_grpo.toml", [f"--{key}={json.dumps(x)}" for key, x in sizes.items()])


def reward(policy: Policy, data: PromptSet, config: Config) -> float:
    """Mean reward of four answers to each prompt."""
    how = sampling_settings(config, policy, EVALUATE)
    return statistics.mean(a.reward.value for a in answer(policy, data, [range(4)] * len(data.prompts), how))


def change(trainer: Trainer, base: Decoder) -> Tensor:
    """All weights' change, end to end, in float64; what lies beside a weight counts with it."""
    changes = []
    for new, old in zip(trainer.policy.model.parameters(), base.parameters(), strict=True):
        rest = trainer.optimizer.adamw.state[new].get("rest")
        learned = new.detach() if rest is None else dph.optimizer.join(new.detach(), rest)
        changes.append((learned.double() - old.double()).flatten())
    return torch.cat(changes).detach()


def rounded_base(model: str, folder: Path) -> Path:
    """A copy of a model's folder with its weights in bf16, so that all runs start from the same ones."""
    source = build_base(Path("runs"), 0, 1) if model == "miniature" else Path(model)
    copy = Path(shutil.copytree(source, folder / "base"))
    save_model(load_model(source), copy, torch.bfloat16)
    return copy


def train(rule: str, seed: int, folder: Path, wanted: argparse.Namespace) -> Trainer:
    """The run of one rule, finished."""
    dph.optimizer.split, dph.optimizer.join = RULES[rule]
    torch.manual_seed(seed)  # of the random rule
    config = settings(rule, seed, folder, wanted)
    policy = load_policy(wanted.model, config, set_up(config))
    open_run(config)
    prompts = tokenize(open_task("miniature:train", config), policy.tokenizer, config)
    recorded = None if rule == "fp32" else folder / f"fp32-{seed}"
    trainer = Trainer(config, policy, Data(prompts, recorded=recorded))
    trainer.run()
    return trainer


def compare(seed: int, folder: Path, wanted: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each rule's figures for one seed. `nats` and `reward` are of the weights that the model reads, in fp32."""
    config = settings("fp32", seed, folder, wanted)
    trainers = {"fp32": train("fp32", seed, folder, wanted)}
    first = trainers["fp32"].policy
    base = load_base(first, first.folder)
    tensors = load_file(folder / f"fp32-{seed}" / "rollouts" / f"step-{wanted.steps}.safetensors")
    last = unpack({name.removeprefix("rollouts."): tensor for name, tensor in tensors.items()})
    whole = change(trainers["fp32"], base)
    test = tokenize(open_task("miniature:test", config), first.tokenizer, config)
    few = PromptSet(test.task, test.prompts[:100])
    found: dict[str, dict[str, float]] = {}
    for rule in RULES:
        trainer = trainers.get(rule) or train(rule, seed, folder, wanted)
        mine, policy = change(trainer, base), trainer.policy
        model = policy.model.float()
        distances = kl_to_base(model, base if rule == "fp32" else first.model, last, config)
        found[rule] = {
            "moved": float(mine.norm() / whole.norm()),
            "off": float((mine - whole).norm() / whole.norm()),
            "nats": statistics.mean(distances.values()),
            "reward": reward(policy, few, config),
        }
        print(seed, rule, found[rule], flush=True)
    return found


@torch.no_grad()
def gaps(kind: list[str], model: str) -> tuple[float, float]:
    """Mean distance of a token's log-probability, of the sampler from the scorer, and of the scorer from fp32."""
    config = load_config("configs/miniature_grpo.toml", [f"--model.path={model}", *kind])
    in_fp32 = load_config("configs/miniature_grpo.toml", [f"--model.path={model}"])
    policy, exact = (load_policy(model, each, set_up(each)) for each in (config, in_fp32))
    data = tokenize(open_task("miniature:train", config), policy.tokenizer, config)
    few = PromptSet(data.task, data.prompts[:48])
    how = sampling_settings(config, policy, EVALUATE)
    actor = acting(policy, config.run.dtype)
    drawn = [each.rollout for each in answer(actor, few, [range(8)] * len(few.prompts), how)]
    with autocast(policy.model, config.run.dtype):
        scored = score_rollouts(policy.model, drawn, 1.0, config.train.microbatch_tokens)
    right = score_rollouts(exact.model, drawn, 1.0, config.train.microbatch_tokens)
    found = [torch.tensor([x for each in rows for x in each.logprobs]) for rows in (drawn, scored, right)]
    return float((found[0] - found[1]).abs().mean()), float((found[1] - found[2]).abs().mean())


def cell(values: list[float]) -> str:
    """The mean, and half of its interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5 if len(values) in STUDENT else 0.0
    return f"{statistics.mean(values):.3g} ({half:.2g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="miniature")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-5, help="a tenth of the miniature's: small against the weights")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--gaps", action="store_true", help="instead: how far sampler and scorer are apart")
    wanted = parser.parse_args()
    if wanted.gaps:
        model = str(build_base(Path("runs"), 0, 1)) if wanted.model == "miniature" else wanted.model
        print("| settings | sampler from scorer | scorer from fp32 |\n| --- | --- | --- |")
        for kind in ([], ["--run.dtype=bf16"], ["--run.dtype=bf16", "--model.dtype=bf16"]):
            print(f"| {' '.join(kind) or 'fp32'} | {' | '.join(f'{gap:.1e}' for gap in gaps(kind, model))} |")
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted.model = str(rounded_base(wanted.model, Path(folder)))
        seeds = range(wanted.first_seed, wanted.first_seed + wanted.seeds)
        found = [compare(seed, Path(folder), wanted) for seed in seeds]
    names = list(found[0]["fp32"])
    print(f"| rule | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    for rule in RULES:
        cells = [cell([each[rule][name] for each in found]) for name in names]
        print(f"| {rule} | {' | '.join(cells)} |")
    if wanted.out:
        wanted.out.write_text(json.dumps({**machine(), **vars(wanted), "found": found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
