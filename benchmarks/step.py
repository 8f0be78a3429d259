"""Seconds and memory of one training step, method by method: python -m benchmarks.step MODEL

Each method trains a few steps from the same start, in a process of its own: --prompts x --samples answers of at most
--tokens tokens that end where the model ends them; methods that rehearse train on as many stored answers besides. The
reward is a coin thrown by the answer's text, so a step's cost does not hang on what the model can solve; prompts beyond
the share --mixed are always answered rightly, so that their rows have no advantage, as is often the case for half.
With --trl, where it is installed (pip install trl), TRL takes the same GRPO step: same prompts, limits, rewards and
type, which for both is bf16 autocast over fp32 weights where --dtype says bf16.

The limit is the time of the step's matrix products alone: those of each decode step at the rows then in work, and three
times (forward, and backward to inputs and weights) those of the trained tokens, micro-batch by micro-batch; what
answers have in common is computed once, as in the step.

MODEL is a model folder, or `miniature`. The table gives medians over the steps after the first.
"""

import argparse
import hashlib
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import cost, machine
from benchmarks.sampler import ASKED
from benchmarks.sampler import limit as decode_limit
from dph.answering import EVALUATE, Policy, acting, answer, autocast, sampling_settings, score_rollouts
from dph.cli import load_policy, open_task, set_up
from dph.config import Config, load_config
from dph.presampling import Partition
from dph.prompts import PromptSet, tokenize
from dph.rollouts import Rollout, collate, group_by_tokens
from dph.tasks import Prompt, Reward, Task
from dph.trainer import Data, Trainer

METHODS = ["grpo", "dph_f", "dph_js", "rkl", "dph_js_definition", "dph_f_top32"]


def coin(index: int, text: str, mixed: float) -> float:
    """1 or 0, by a hash of the text; always 1 for prompts outside the share `mixed`."""
    if int((index + 1) * mixed) == int(index * mixed):
        return 1.0
    return float(hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 2)


class CoinTask(Task):
    """Prompts whose answers are right by chance."""

    mixed = 1.0

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        return [Reward.of("right" if coin(prompt.index, text, self.mixed) else "wrong") for prompt, text in pairs]


def make_task(model: str, count: int, config: Config) -> CoinTask:
    """`count` prompts: of the miniature its own, of other models those of benchmarks/sampler.py."""
    if model == "miniature":
        return CoinTask("coin", open_task("miniature:train", config).prompts()[:count])
    asked = ({"role": "user", "content": ASKED[i % len(ASKED)]} for i in range(count))
    return CoinTask("coin", [Prompt(i, (message,), None, {}) for i, message in enumerate(asked)])


def settings(method: str, wanted: argparse.Namespace, folder: str) -> Config:
    """The method's losses, from its config for the miniature, with the sizes of this benchmark."""
    rows = wanted.prompts * wanted.samples
    sizes = {
        "model.path": wanted.model, "run.folder": folder if wanted.model != "miniature" else "runs",
        "model.compile": wanted.compile,
        "train.shard": getattr(wanted, "shard", "none"),
        "run.dtype": wanted.dtype, "run.threads": wanted.threads, "data.eval": [], "data.max_prompt_tokens": 1024,
        "sampling.max_new_tokens": wanted.tokens, "sampling.max_rows": rows, "train.prompts_per_step": wanted.prompts,
        "train.responses_per_prompt": wanted.samples, "train.rehearsal_rows": rows, "train.passes": 1,
        "train.microbatch_tokens": wanted.microbatch_tokens, "optim.lr": 1e-6,
    }  # fmt: skip
    return load_config(f"configs/miniature_{method}.toml", [f"--{key}={json.dumps(v)}" for key, v in sizes.items()])


def rehearsal(policy: Policy, data: PromptSet, config: Config) -> list[Rollout]:
    """As many answers of the model as a step samples, with what presampling would store of them."""
    how = sampling_settings(config, policy, EVALUATE)
    numbers = [range(config.train.responses_per_prompt)] * len(data.prompts)
    rows = [a.rollout for a in answer(policy, data, numbers, how)]
    budget, top_k = config.train.microbatch_tokens, config.presample.stored_top_k
    for rollout, scored in zip(rows, score_rollouts(policy.model, rows, 1.0, budget, top_k), strict=True):
        rollout.logprobs, rollout.top = scored.logprobs, scored.top
    return rows


def measure(method: str, wanted: argparse.Namespace, after: Callable[[], None] = lambda: None) -> dict[str, float]:
    """One method's medians; `after` is called after each step, the one to warm up included."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(method, wanted, folder)
        config.run_folder.mkdir(parents=True, exist_ok=True)
        device, task = set_up(config), make_task(wanted.model, wanted.prompts, config)
        task.mixed = wanted.mixed
        steps: list[dict[str, Any]] = []
        with cost() as everything:
            policy = load_policy(config.model.path, config, device)
            data = tokenize(task, policy.tokenizer, config)
            reference = load_policy(config.model.path, config, device).model if config.loss.needs_reference else None
            indices = [prompt.index for prompt in data.prompts]
            stored = rehearsal(policy, data, config) if config.loss.uses_stored_answers else []
            trainer = Trainer(config, policy, Data(data, Partition(indices, indices, stored), reference))
            for _ in range(wanted.steps + 1):
                with cost() as step:
                    row = trainer.train_step()
                steps.append({**row, "step": step.seconds})
                after()
        numbers = [key for key, value in steps[1].items() if isinstance(value, float)]
        median = {key: statistics.median(s[key] for s in steps[1:]) for key in numbers}
        rows = wanted.prompts * wanted.samples * (2 if stored else 1)
        median |= {"peak": everything.peak, "rows": rows, "models": 1.0 + (reference is not None)}
        if method == "grpo":
            median["limit"] = limit(policy, rehearsal(policy, data, config), config)
        return median


def limit(policy: Policy, rollouts: list[Rollout], config: Config) -> float:
    """Seconds of the matrix products of sampling these answers and of training on them."""
    model, actor = policy.model, acting(policy, config.run.dtype).model
    linears = [module.weight for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    lengths = [len(r.tokens) for r in rollouts]

    def forward_and_backward(tokens: int, head: int) -> None:
        for weight, rows in [*((w, tokens) for w in linears), (model.head, head)]:
            x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            y = nn.functional.linear(x, weight)
            torch.mm(y, weight), torch.mm(y.T, x)

    with torch.no_grad(), cost() as found:
        for position in range(max(lengths)):
            decode_limit(actor, sum(length > position for length in lengths), 1)
        with autocast(model, config.run.dtype):
            for group in group_by_tokens(rollouts, config.train.microbatch_tokens):
                batch = collate([rollouts[i] for i in group], model.head.device)
                forward_and_backward(len(batch.tokens), len(batch.targets))
    return found.seconds


def measure_trl(wanted: argparse.Namespace) -> dict[str, float]:
    """TRL's GRPOTrainer on the same step."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.cost = cost()
            self.step = self.cost.__enter__()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.cost.__exit__(None, None, None)
            seconds.append(self.step.seconds)

    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    with tempfile.TemporaryDirectory() as folder, cost() as everything:
        rows = wanted.prompts * wanted.samples
        arguments = trl.GRPOConfig(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=rows // 8, max_steps=wanted.steps + 1,
            num_generations=wanted.samples, max_completion_length=wanted.tokens, beta=0.0, temperature=1.0,
            learning_rate=1e-6, bf16=wanted.dtype == "bf16", use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no",
            shuffle_dataset=False, disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        asked = [ASKED[i % len(ASKED)] for i in range(wanted.prompts)]
        data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in asked])

        def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
            pairs = zip(prompts, completions, strict=True)
            return [coin(asked.index(p[0]["content"]), c[0]["content"], wanted.mixed) for p, c in pairs]

        trl.GRPOTrainer(wanted.model, reward, arguments, train_dataset=data, callbacks=[Clock()]).train()
    return {"step": statistics.median(seconds[1:]), "peak": everything.peak, "models": 1.0, "rows": rows}


def alone(function: Any, *arguments: Any) -> dict[str, float]:
    """Calls a function in a fresh process, whose memory is then its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)  # type: ignore[no-any-return]


def show(found: dict[str, dict[str, float]]) -> None:
    columns = "models | sampling, grading, s | scoring | training | step | step / grpo | training a token / grpo"
    print(f"| method | {columns} | tokens/s | peak MiB |\n|" + " --- |" * 10)
    first = found["grpo"]
    for name, f in found.items():
        parts = [f"{f.get(f'seconds/{key}', float('nan')):.2f}" for key in ("sample_and_grade", "score", "train")]
        a_token = [g.get("seconds/train", float("nan")) / g.get("trained_tokens", 1.0) for g in (f, first)]
        rate = (f.get("sampled_tokens", float("nan")) + f.get("trained_tokens", float("nan"))) / f["step"]
        ratios = [f"{f['step']:.2f}", f"{f['step'] / first['step']:.2f}", f"{a_token[0] / a_token[1]:.2f}"]
        cells = [name, f"{f['models']:.0f}", *parts, *ratios, f"{rate:,.0f}", f"{f['peak']:,.0f}"]
        print(f"| {' | '.join(cells).replace('nan', '-')} |")
    print(f"limit: {first['limit']:.2f} s; grpo's step is {first['step'] / first['limit']:.2f} times that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a model folder, or miniature")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=("fp32", "bf16"), help="one table for each")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves PyTorch's own choice")
    parser.add_argument("--microbatch-tokens", type=int, default=2048)
    parser.add_argument("--mixed", type=float, default=0.5, help="share of prompts whose answers' rewards differ")
    parser.add_argument("--compile", action="store_true", help="compile the layers of ours")
    parser.add_argument("--trl", action="store_true", help="measure TRL, too")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    wanted = parser.parse_args()
    found = {}
    for dtype in wanted.dtype:
        one = argparse.Namespace(**{**vars(wanted), "dtype": dtype})
        rows = {name: alone(measure, name, one) for name in dict.fromkeys(["grpo", *wanted.methods])}
        if wanted.trl:
            rows["trl"] = alone(measure_trl, one)
        print(f"\n{dtype}")
        show(rows)
        found[dtype] = rows
    if wanted.out:
        wanted.out.write_text(json.dumps({**machine(), **vars(wanted), "found": found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
