"""Evaluation (E11): greedy, pass@1 and pass@k with intervals; keep and explore against a base model.

`evaluate` answers the prompts of one set; everything else is statistics on the counts, so a table or a picture can be
made again from the JSON files without a model. pass@k is the unbiased estimator of arXiv 2107.03374; intervals are
95 % bootstrap intervals over problems.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dph.adapter import as_reference
from dph.adapter_folder import load_merged
from dph.answering import EVALUATE, Answer, Policy, acting, answer, autocast, sampling_settings, score_rollouts
from dph.checkpoint import MADE_FROM, as_the_writer_reads, write_text
from dph.config import Config
from dph.divergences import EXP_LIMIT
from dph.errors import UserError, read_json
from dph.made_from import answer_settings, changed, made_from, model_hash
from dph.model import Decoder
from dph.prompts import PromptSet
from dph.rollouts import Rollout
from dph.tasks.base import FAILED
from dph.tokenizer import load_tokenizer

RESAMPLES = 1000


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k), the chance that k of n answers hold a correct one, as a running product.

    Raises: ValueError if samples < k.
    """
    if samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    if samples - correct < k:
        return 1.0
    factors = 1.0 - k / np.arange(samples - correct + 1, samples + 1)
    return 1.0 - float(np.prod(factors))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean over problems, from a fixed stream of resamples."""
    data = np.asarray(values, dtype=np.float64)
    stream = np.random.default_rng(0)
    picks = stream.integers(len(data), size=(RESAMPLES, len(data)))
    means = data[picks].mean(1)  # (RESAMPLES,)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def keep_explore(base: Mapping[int, int], new: Mapping[int, int]) -> tuple[float, float]:
    """Shares of problems, "solved" meaning at least one correct answer, over the problems that both counts hold.

    Args:
        base, new: correct answers of each problem.

    Returns: keep = solved by both / solved by base; explore = solved by the new one alone / not solved by base. NaN
        where a denominator is 0.
    """
    both = [problem for problem in base if problem in new]
    solved = [problem for problem in both if base[problem] > 0]
    unsolved = [problem for problem in both if base[problem] == 0]
    return _share_solved(solved, new), _share_solved(unsolved, new)


def _share_solved(problems: Sequence[int], correct: Mapping[int, int]) -> float:
    """The share of these problems with a correct answer; NaN of none."""
    if not problems:
        return float("nan")
    return sum(correct[problem] > 0 for problem in problems) / len(problems)


def evaluate(
    policy: Policy,
    data: PromptSet,
    config: Config,
    samples: int,
    greedy: bool,
    base: Decoder | None = None,
    bar: bool = True,
) -> tuple[dict[str, Any], list[Answer]]:
    """Draws `samples` answers to every prompt of a set, and one greedy answer.

    Args:
        base: the initial policy; with it each problem gets `kl_to_base`.

    Returns: {"source", "n", "problems": [{"prompt", "correct", "greedy", ...}]}, and the sampled answers.
    """
    actor = acting(policy, config.run.dtype)
    settings = sampling_settings(config, policy, EVALUATE, top_p=config.eval.top_p)
    at_random = replace(settings, temperature=config.eval.temperature)
    greedily = replace(settings, temperature=0.0)
    count = len(data.prompts)
    drawn: dict[int, list[Answer]] = {prompt.index: [] for prompt in data.prompts}
    best: dict[int, Answer] = {}
    with tqdm(total=count * (samples + greedy), desc=data.task.name, unit="answer", disable=not bar) as progress:
        for got in answer(actor, data, [range(samples)] * count, at_random):
            drawn[got.rollout.prompt].append(got)
            progress.update()
        if greedy:
            for got in answer(actor, data, [range(1)] * count, greedily):
                best[got.rollout.prompt] = got
                progress.update()
    problems = {index: _problem(index, answers) for index, answers in drawn.items()}
    for index, got in best.items():
        problems[index]["greedy"] = float(got.reward.value == 1)
    everything = [each for answers in drawn.values() for each in answers]
    if base is not None:
        distances = kl_to_base(policy.model, base, [each.rollout for each in everything], config)
        for index, distance in distances.items():
            problems[index]["kl_to_base"] = distance
    return {"source": data.task.name, "n": samples, "problems": list(problems.values())}, everything


def kl_to_base(policy: Decoder, base: Decoder, rollouts: Sequence[Rollout], config: Config) -> dict[int, float]:
    """KL(pi_theta || pi_ref) on answers of pi_theta, nats a token, for each prompt: what forgetting goes with.

    How far a policy has moved from its base on what it says predicts what it forgets (arXiv 2509.04259). Estimated by
    the mean of e^-l - 1 + l, l = log(pi_theta / pi_ref): without bias where answers are drawn at eval.top_p = 1, never
    negative, and of low variance (k3 as a value; as a loss it is another thing, see docs/equations.md).
    """
    temperature = config.eval.temperature
    budget = config.train.microbatch_tokens
    with autocast(policy, config.run.dtype):
        by_policy = score_rollouts(policy, rollouts, temperature, budget)
        with as_reference(base) as pi_ref:
            by_base = score_rollouts(pi_ref, rollouts, temperature, budget)
    totals: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    for rollout, new, old in zip(rollouts, by_policy, by_base, strict=True):
        log_u = np.array(new.logprobs) - np.array(old.logprobs)  # (T,)
        k3 = np.expm1(np.minimum(-log_u, EXP_LIMIT)) + log_u
        totals[rollout.prompt] += float(k3.sum())
        tokens[rollout.prompt] += len(rollout.tokens)
    return {prompt: totals[prompt] / tokens[prompt] for prompt in totals}


def load_base(policy: Policy, folder: Path) -> Decoder:
    """The initial policy, to be compared with; of the policy's type, on its device.

    A policy with adapters on the model of this folder is that one itself, see `adapter.as_reference`.
    """
    if policy.model.base and folder == policy.folder:
        return policy.model
    weight = policy.model.head
    return load_merged(folder, weight.dtype, weight.device).requires_grad_(False)


def _problem(index: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """What is counted of the n answers to one problem."""
    n = len(answers)
    tokens = sum(len(each.rollout.tokens) for each in answers)
    logprob = sum(sum(each.rollout.logprobs) for each in answers)
    failed = sum(each.reward.outcome in FAILED for each in answers)
    return {
        "prompt": index,
        "correct": sum(bool(each.reward.value == 1) for each in answers),
        "distinct": len({each.text for each in answers}),
        "tokens": tokens / n,
        "entropy": -logprob / tokens,
        "truncated": sum(not each.rollout.finished for each in answers) / n,
        "errors": failed / n,
    }


def summarise(result: Mapping[str, Any], ks: Sequence[int]) -> dict[str, Any]:
    """Means over the problems of one set: each score as [mean, low, high], the rest as plain means.

    mean@n is pass@1; `entropy` is nats a token, estimated by -log pi of what was sampled.
    """
    problems = result["problems"]
    n = result["n"]
    scores: dict[str, list[float]] = {}  # of each problem
    if all("greedy" in p for p in problems):
        scores["greedy"] = [p["greedy"] for p in problems]
    for k in sorted({1, *ks}):
        if k <= n:
            scores[f"pass@{k}"] = [pass_at_k(n, p["correct"], k) for p in problems]
    summary: dict[str, Any] = {}
    for name, values in scores.items():
        summary[name] = [float(np.mean(values)), *interval(values)]
    for name in ("distinct", "tokens", "entropy", "truncated", "errors", "kl_to_base"):
        if all(name in p for p in problems):
            summary[name] = float(np.mean([p[name] for p in problems]))
    return summary


def evaluate_model(
    policy: Policy, sets: Sequence[PromptSet], config: Config, name: str, base_folder: Path | None = None
) -> dict[str, Any]:
    """A full evaluation of one model, written to RUN/evaluation/NAME.json set by set.

    A set that stands there already is not answered again, if it was made from the same (dph/made_from.py); if not, a
    line says what has changed.

    Args:
        base_folder: of the initial policy, which is in memory meanwhile, for `kl_to_base`; None for that policy itself.
            One with other tokens cannot be compared with, and is not.
    """
    path = config.run_folder / "evaluation" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    n, greedy = config.eval.samples, config.eval.greedy
    settings: dict[str, Any] = {
        **answer_settings(config),
        "n": n,
        "greedy": greedy,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
    }
    base = None
    compared_with: dict[str, str] = {}
    if base_folder is not None and load_tokenizer(base_folder).vocabulary == policy.tokenizer.vocabulary:
        base = load_base(policy, base_folder)
        with as_reference(base) as pi_ref:
            compared_with["base"] = model_hash(replace(policy, model=pi_ref))
    old = as_the_writer_reads(path).get("sets", {})
    model = model_hash(policy)
    report: dict[str, Any] = {"model": name, "sets": {}}
    to_come = {data.task.name: old[data.task.name] for data in sets if data.task.name in old}
    for data in sets:
        result = old.get(data.task.name, {})
        made = made_from(policy, data, settings, model) | compared_with
        differs = changed(result.get("fingerprint", {}), made)
        if result and differs:
            print(f"{path}: {data.task.name}: made with other {differs}; answered again")
        if differs:
            result, _ = evaluate(policy, data, config, n, greedy, base)
            result["fingerprint"] = made
            data.task.close()
        report["sets"][data.task.name] = {**result, "summary": summarise(result, config.eval.k)}
        on_disk = {"model": name, "sets": to_come | report["sets"]}  # a stop loses no set that comes later
        write_text(path, json.dumps(on_disk) + "\n")
    return report


def keep_own_reports(config: Config, name: str, policy: Policy) -> None:
    """Raises a UserError where a report of this name is what train.py wrote of another model: the base, or its result.

    Comparisons read those two; under another name, or in another run's folder, a report takes nothing from them.
    """
    path = config.run_folder / "evaluation" / f"{name}.json"
    if name not in ("base", config.run.name) or not (config.run_folder / MADE_FROM).exists() or not path.exists():
        return
    sets = read_json(path).get("sets", {})
    if any(found.get("fingerprint", {}).get("model") != model_hash(policy) for found in sets.values()):
        raise UserError(
            f"{path}: is this run's own report of another model; rename {policy.folder}, or take --run.name"
        )


def short_names(paths: Sequence[str]) -> list[str]:
    """A file name for each model: the last parts of its path, as many as tell them all apart."""
    parts = [path.strip("/").split("/") for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["-".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"the same model is named twice: {' '.join(paths)}")
