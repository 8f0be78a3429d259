"""Every setting of the project: its name, default, meaning and bounds. The only home of defaults.

A config is a TOML file of the sections below; `extends = "other.toml"` (beside it) starts from another file, and
`--section.key=value` on the command line has the last word. Strict: an unknown key, a wrong type, a value out of
bounds is a UserError that names the key, the value and what would be right.
"""

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dph.config_values import checked_section, key, nearest, parse_override, read_tables, split_override
from dph.divergences import Divergence, make_divergence
from dph.errors import UserError

MANY = 1_000_000  # more answers, prompts or tokens than one step holds: where a larger number is a slip of the hand
# In fp32 the alpha generator loses digits towards 0: over 0.01 <= |log u| <= 8 the largest relative error of f and of
# its gradient is 0.2 % at 0.01, 2 % at 0.001, 24 % at 1e-4; at 1e-8 both are 0. Towards 1 it stays below 0.004 %.
# (tests/test_divergences.py measures it.)
LEAST_ALPHA = 0.01
FIELDS = ("prompt", "answer")  # what [data] fields may name the columns of


@dataclass(frozen=True)
class RunConfig:
    """[run] where and how a run happens."""

    name: str = key("run", "name of the run; its folder is FOLDER/NAME")
    folder: str = key("runs", "folder of all runs")
    seed: int = key(0, "seed of data order, sampling and generated worlds", low=0)
    device: str = key("auto", "auto takes cuda where there is one", "auto", "cpu", "cuda")
    dtype: str = key("fp32", "what is computed in; bf16 over fp32 weights is autocast", "fp32", "bf16")
    threads: int = key(0, "CPU threads; 0 leaves PyTorch's own choice", low=0, high=1024)
    tensorboard: bool = key(False, "also write TensorBoard events (needs tensorboard installed)")


@dataclass(frozen=True)
class ModelSection:
    """[model] the initial policy, pi_ref."""

    path: str = key("miniature", "folder in Hugging Face layout, a hub name, or 'miniature' (trained on demand)")
    dtype: str = key("fp32", "what the weights are held in; bf16 takes run.dtype = 'bf16', too", "fp32", "bf16")
    compile: bool = key(False, "torch.compile the layers (needs a C++ compiler on a CPU)")
    adapter_rank: int = key(0, "r: train LoRA adapters of this rank in place of the weights; 0 trains these", low=0)
    adapter_alpha: float = key(32.0, "alpha: adapters add (alpha / r) B A x", low=0.01)


@dataclass(frozen=True)
class DataConfig:
    """[data] prompts and how their answers are judged. A source is TASK:WHERE[?option=value&...]."""

    train: str = key("miniature:train", "source of the training prompts, e.g. math:gsm8k/train.jsonl?limit=500")
    eval: tuple[str, ...] = key((), "sources of the evaluation sets; the first is in domain")
    system: str = key("", "system message put before every prompt that has none")
    instruction: str = key("", "text appended to every bare question")
    fields: dict[str, str] = key({}, "column names of other files: {prompt = ..., answer = ...}")
    template: dict[str, str | bool | int | float] = key({}, "variables of the chat template: {enable_thinking = false}")
    strict: bool = key(True, "math: only a box or #### counts as an answer")
    math_match: str = key("number", "math: a gold number wants a number; value takes sums too", "number", "value")
    db_root: str = key("", "sql: folder of the databases")
    sql_match: str = key("bird", "sql: bird compares sets of rows, spider bags", "bird", "spider")
    sql_variants: int = key(0, "sql: copies of each database with rows changed that must agree, too", low=0, high=100)
    grader_timeout: float = key(3.0, "seconds one answer may take to grade", low=0.01)
    grader_workers: int = key(1, "processes that grade", low=1)
    max_prompt_tokens: int = key(1024, "longer prompts are left out, and counted", low=1)


@dataclass(frozen=True)
class SamplingConfig:
    """[sampling] how a policy answers, in pre-sampling and training."""

    temperature: float = key(1.0, "tau: all log-probabilities are of softmax(logits / tau)", low=0.01)
    max_new_tokens: int = key(512, "longest answer, the end token included", low=1, high=MANY)
    max_rows: int = key(64, "answers written side by side", low=1, high=MANY)
    graphs: bool = key(
        False, "record a decode step of each shape and replay it: on a GPU, for small models (CUDA graphs)"
    )


@dataclass(frozen=True)
class PresampleConfig:
    """[presample] the partition into D_pef and D_exp (E7)."""

    responses: int = key(8, "k, answers of pi_ref to each training prompt", low=1, high=MANY)
    threshold: int = key(8, "near-perfect from this many correct answers of k", low=1)
    confirm: bool = key(True, "one more sample must be correct too; false rehearses correct ones of the k samples")
    rehearsal_responses: int = key(1, "answers drawn for rehearsal of each near-perfect prompt", low=1, high=MANY)
    top_p: float = key(1.0, "nucleus used here alone", low=0.01, high=1.0)
    stored_top_k: int = key(0, "pi_ref's likeliest tokens stored at each position (E10); 0 stores none", low=0)
    drop_unsolved: bool = key(False, "leave prompts without a correct answer out of D_exp")


@dataclass(frozen=True)
class LossConfig:
    """[loss] the objective: L_exp (E4) and eta times one divergence, from the reference's samples or our own."""

    divergence: str = key("none", "name of a generator of dph/divergences.py, or none")
    samples: str = key("reference", "stored answers (E5), own: a penalty (E2), both: E8", "reference", "own", "both")
    eta: float = key(0.0, "weight of the divergence (E6)", low=0.0)
    alpha: float = key(0.5, "order of the alpha divergence, 0.01 or more and below 1", low=0.0, high=1.0)
    skew: float = key(0.5, "lambda of skew_js", low=0.0, high=1.0)
    divergence_form: str = key("standard", "plain: forward_kl as -log u, supervised", "standard", "plain")
    penalty_estimator: str = key("k3", "with own samples; k3 pulls as the forward KL", "k3", "k3_importance", "exact")
    ratio_cap: float = key(2.0, "largest importance weight on own samples, where pi_old lags behind (E2, E8)", low=1.0)
    entropy: float = key(0.0, "weight of an entropy bonus", low=0.0)
    clip_low: float = key(0.2, "epsilon_low of the clipped ratio", low=0.0, high=1.0)
    clip_high: float = key(0.28, "epsilon_high", low=0.0)
    dual_clip: float = key(0.0, "c > 1 bounds the loss of negative advantages; 0 is off", low=0.0)
    aggregation: str = key(
        "token-mean",
        "mean of all tokens, of the answers' means, or of the answers' sums over L (E4)",
        "token-mean",
        "sequence-mean",
        "sequence-sum",
    )
    aggregation_length: int = key(0, "L of sequence-sum; 0 takes sampling.max_new_tokens", low=0)
    advantage_std: bool = key(True, "divide by the group's standard deviation; false is Dr. GRPO")

    @property
    def uses_stored_answers(self) -> bool:
        """Whether pi_ref's stored answers to D_pef are rehearsed (E5, E8, E10): the run needs a partition."""
        return self.divergence != "none" and self.samples in ("reference", "both")

    @property
    def penalises_rollouts(self) -> bool:
        """Whether the divergence is a penalty on the explored rollouts themselves (E2)."""
        return self.divergence != "none" and self.samples == "own"

    @property
    def answers_pef_prompts(self) -> bool:
        """Whether prompts of D_pef are answered anew, for the second half of E8."""
        return self.divergence != "none" and self.samples == "both"

    @property
    def needs_reference(self) -> bool:
        """Whether pi_ref has to be in memory while training."""
        return self.penalises_rollouts or self.answers_pef_prompts

    def make_divergence(self) -> Divergence | None:
        """The generator with its settings, where there is a divergence. UserError: an unknown name."""
        if self.divergence == "none":
            return None
        form = self.divergence_form
        return make_divergence(self.divergence, alpha=self.alpha, skew=self.skew, divergence_form=form)


@dataclass(frozen=True)
class TrainConfig:
    """[train] the loop."""

    steps: int = key(200, "rollout steps", low=0)
    explore: str = key("exp", "prompts to explore where there is a partition: D_exp's or all", "exp", "all")
    prompts_per_step: int = key(24, "prompts explored a step", low=1, high=MANY)
    responses_per_prompt: int = key(8, "G, answers of one group", low=2, high=MANY)
    updates_per_step: int = key(2, "optimizer steps into which a step's rollouts are cut", low=1, high=MANY)
    passes: int = key(1, "times that a step's rollouts are gone through (GRPO's mu)", low=1, high=MANY)
    rehearsal_rows: int = key(64, "stored answers of D_pef in one optimizer step", low=1, high=MANY)
    microbatch_tokens: int = key(16384, "tokens, padding included, of one forward and backward pass", low=1)
    shard: str = key("none", "full: each of torchrun's processes holds a share of the weights (FSDP2)", "none", "full")
    recompute: bool = key(False, "compute a layer's activations again in the backward pass: less memory, more time")
    dynamic_sampling: int = key(0, "further rounds that replace groups all right or all wrong (DAPO); 0 is off", low=0)
    overlong_buffer: int = key(0, "tokens over which DAPO's overlong penalty grows to -1; 0 is off", low=0)
    record_rollouts: bool = key(False, "keep every step's rollouts, for train.py --rollouts-from RUN")
    eval_every: int = key(50, "steps between evaluations; 0 never", low=0)
    save_every: int = key(50, "steps between checkpoints; 0 only at the end", low=0)
    save_dtype: str = key("fp32", "fp32: a checkpoint's weights as held; bf16: rounded, those beside", "fp32", "bf16")
    keep_last: int = key(2, "newest checkpoints kept", low=1)
    keep_best: bool = key(False, "also keep the checkpoint with the best pass@1 of the first evaluation set")

    @property
    def on_policy(self) -> bool:
        """Whether the policy that learns from rollouts is always the one that wrote them: a step is one update.

        A recording is for others, who need the log-probabilities of pi_old that it holds; so it uses them itself.
        """
        return self.updates_per_step * self.passes == 1 and not self.record_rollouts


@dataclass(frozen=True)
class OptimConfig:
    """[optim] AdamW."""

    lr: float = key(1e-6, "learning rate", low=0.0)
    betas: tuple[float, ...] = key((0.9, 0.99), "decay of the two moments", low=0.0, high=0.99999)
    weight_decay: float = key(0.0, "decoupled weight decay", low=0.0)
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", low=0)
    grad_clip: float = key(1.0, "largest norm of the gradient; 0 is off", low=0.0)


@dataclass(frozen=True)
class EvalConfig:
    """[eval] greedy, pass@1 and pass@k (E11)."""

    samples: int = key(64, "n, answers to each prompt in a full evaluation", low=1, high=MANY)
    k: tuple[int, ...] = key((1, 8, 16, 32), "the k of pass@k", low=1)
    temperature: float = key(1.0, "temperature of the n answers", low=0.01)
    top_p: float = key(1.0, "nucleus of the n answers", low=0.01, high=1.0)
    greedy: bool = key(True, "also one answer at temperature 0")
    during_samples: int = key(8, "n of the evaluations during training", low=1, high=MANY)
    during_prompts: int = key(64, "prompts of each set in those", low=1)
    final: bool = key(True, "train.py ends with a full evaluation of base and result")


@dataclass(frozen=True)
class Config:
    """All sections. `load_config` makes one and checks it."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    presample: PresampleConfig = field(default_factory=PresampleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def run_folder(self) -> Path:
        """Where everything of this run lies."""
        return Path(self.run.folder) / self.run.name


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file (None: defaults alone) and `--section.key=value` arguments into a checked Config."""
    tables = read_tables(Path(path)) if path is not None else {}
    sections = {f.name: f for f in dataclasses.fields(Config)}
    for argument in overrides:
        section, name, text = split_override(argument)
        hints = typing.get_type_hints(sections[section].default_factory) if section in sections else {}
        tables.setdefault(section, {})[name] = parse_override(text, hints.get(name))
    for name in tables:
        if name not in sections:
            raise UserError(f"unknown section [{name}]{nearest(name, sections)}")
    made = {name: checked_section(f.default_factory, name, tables.get(name, {})) for name, f in sections.items()}
    config = Config(**made)
    _check(config)
    return config


def _check(config: Config) -> None:
    """Rules between keys."""
    loss, presample, train = config.loss, config.presample, config.train
    rules = [
        (presample.threshold <= presample.responses,
         f"presample.threshold = {presample.threshold} should be at most presample.responses = {presample.responses}"),
        (LEAST_ALPHA <= loss.alpha < 1,
         f"loss.alpha = {loss.alpha:.12g} should be at least {LEAST_ALPHA} and below 1: nearer to 0 fp32 has no digits "
         "for it; its limits are reverse_kl at 0, forward_kl at 1"),
        (not loss.eta or loss.divergence != "none",
         f"loss.eta = {loss.eta:g} weighs nothing: loss.divergence is 'none'; name one, or leave loss.eta at 0"),
        (0 < loss.skew < 1, f"loss.skew = {loss.skew:g} should lie strictly between 0 and 1"),
        (loss.dual_clip == 0 or loss.dual_clip > 1, f"loss.dual_clip = {loss.dual_clip:g} should be 0 or above 1"),
        (config.model.dtype == "fp32" or config.run.dtype == "bf16",
         f"model.dtype = 'bf16' computes in bf16; run.dtype = {config.run.dtype!r} should be 'bf16', too"),
        (len(config.optim.betas) == 2, f"optim.betas = {list(config.optim.betas)} should be two numbers"),
        (loss.divergence_form == "standard" or loss.divergence == "forward_kl",
         f"loss.divergence_form = 'plain' goes with loss.divergence = 'forward_kl', not {loss.divergence!r}"),
        (loss.samples != "own" or loss.divergence in ("none", "reverse_kl") or loss.penalty_estimator == "exact",
         f"loss.divergence = {loss.divergence!r} on own samples needs loss.penalty_estimator = 'exact'"),
        (loss.samples != "both" or (loss.divergence == "js" and not presample.stored_top_k),
         "loss.samples = 'both' is the definition of loss.divergence = 'js', without presample.stored_top_k"),
        (train.overlong_buffer < config.sampling.max_new_tokens,
         f"train.overlong_buffer = {train.overlong_buffer} should be below sampling.max_new_tokens"),
        (train.prompts_per_step >= train.updates_per_step,
         f"train.updates_per_step = {train.updates_per_step} is more than train.prompts_per_step; each needs a group"),
        (train.shard == "none" or not config.model.compile,
         "train.shard = 'full' samples with a new copy of the model in each step, which model.compile would compile "
         "anew; take one of the two"),
        (not config.eval.k or max(config.eval.k) <= config.eval.samples,
         f"eval.k = {list(config.eval.k)} should not exceed eval.samples = {config.eval.samples}"),
        (not config.model.adapter_rank or train.save_dtype == "fp32",
         "train.save_dtype = 'bf16' is for whole weights; with model.adapter_rank checkpoints hold adapters, in fp32"),
        (len(set(config.data.eval)) == len(config.data.eval),
         f"data.eval = {list(config.data.eval)} should name each set once"),
        (config.run.name not in ("", ".", "..") and "/" not in config.run.name and config.run.name.isprintable(),
         f"run.name = {config.run.name!r} should be one folder name of printable characters"),
        (not config.run.name.startswith("miniature-seed"),
         f"run.name = {config.run.name!r} is the folder of a miniature's databases; choose another"),
        (config.run.name.lower() != "base",
         f"run.name = {config.run.name!r} is the name of the initial policy's report; choose another"),
    ]  # fmt: skip
    for holds, message in rules:
        if not holds:
            raise UserError(message)
    for name in config.data.fields:
        if name not in FIELDS:
            raise UserError(f"data.fields has an unknown name {name!r}{nearest(name, FIELDS)}")
    loss.make_divergence()  # an unknown name is an error at once, not after pre-sampling


def to_toml(config: Config) -> str:
    """The resolved config as TOML; load_config reads it back to an equal one."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = dataclasses.asdict(getattr(config, section.name))
        lines += [f"{name} = {_toml(value)}" for name, value in values.items()] + [""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def describe() -> str:
    """Every key with its default and meaning, for --help."""
    lines = []
    for section in dataclasses.fields(Config):
        kind: Any = section.default_factory
        lines.append(f"\n{kind.__doc__}")
        for f in dataclasses.fields(kind):
            default = getattr(kind(), f.name)
            choices = f" ({' | '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
            lines.append(f"  --{section.name}.{f.name}={_toml(default)}{choices}\n      {f.metadata['meaning']}")
    return "\n".join(lines)
