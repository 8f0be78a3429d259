"""A run as one page: its answers, each token shaded by log u, u f'(u) or advantage. python -m dph.inspect RUN

Writes RUN/inspect.html, which needs no server and no network. pi_theta is the run's newest checkpoint, pi_ref the
config's model; both score the same token ids (`answering.score_rollouts`), and log u is the difference. What is shown:

- explored answers: those of the last step that `train.record_rollouts` kept, else answers that pi_theta writes for this
  page to the first training prompts. Advantages are those within their groups (E3).
- rehearsal answers: those that pre-sampling stored (E5), where the run has any. They have no advantage.

u f'(u) is what the rehearsal loss puts on grad log pi_theta (E2), for the run's own divergence or that of --divergence.
"""

import argparse
import html
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from dph.answering import EVALUATE, Policy, answer, autocast, sampling_settings, score_rollouts
from dph.checkpoint import MADE_FROM, newest_checkpoint
from dph.cli import fail, load_policy, open_task, set_up, to_the_end
from dph.config import Config, load_config
from dph.divergences import Divergence, make_divergence, saturate
from dph.errors import UserError, read_json
from dph.losses import group_advantages
from dph.made_from import OF_THE_RUN, made_from, refuse_other, run_settings
from dph.prompts import PromptSet, tokenize
from dph.rollouts import Rollout, unpack
from dph.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("inspect.html")
WORDS = {"explored": "Exploration,", "rehearsal": "Rehearsal,"}
SHADED_FULLY = 0.98  # of the tokens lie within the colour scale; the rest have its strongest colours


@dataclass(frozen=True)
class Shown:
    """One answer of the page."""

    kind: str  # explored or rehearsal
    rollout: Rollout
    right: bool
    advantage: float | None
    log_theta: list[float]  # of each token under pi_theta ...
    log_ref: list[float]  # ... and pi_ref
    pull: list[float]  # u f'(u) of each token

    @property
    def log_u(self) -> list[float]:
        """Log u of each token."""
        return [theta - ref for theta, ref in zip(self.log_theta, self.log_ref, strict=True)]


def inspect(run: Path, prompts: int = 12, divergence: str = "") -> Path:
    """Writes RUN/inspect.html and returns its path.

    Args:
        run: the folder of a run that has a checkpoint.
        prompts: the most prompts shown of each kind of answers.
        divergence: a generator's name; "" takes the run's, or js where it has none.

    Raises: UserError where the folder holds no run or no checkpoint, or the divergence is unknown.
    """
    run = run.resolve()
    if prompts < 1:
        raise UserError(f"--prompts {prompts} should be at least 1")
    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no run's folder, it holds no config.toml")
    config = load_config(run / "config.toml")
    config = replace(config, run=replace(config.run, folder=str(run.parent)))  # it may have been moved
    chosen = own_divergence(config, divergence)
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise UserError(f"{run}: holds no checkpoint yet; see train.save_every")
    device = set_up(config)
    task = open_task(config.data.train, config)
    policy = load_policy(str(checkpoint), config, device, may_be_adapter=True)
    reference = load_policy(config.model.path, config, device)
    data = tokenize(task, policy.tokenizer, config)
    made = made_from(reference, data, run_settings(config))
    found = {name: value for name, value in read_json(run / MADE_FROM).items() if name not in OF_THE_RUN}
    refuse_other(run, found, made, "its answers cannot be shown beside them")
    explored, origin = explored_answers(run, policy, data, config, prompts)
    shown = judged(explored, policy, reference, data, config, chosen, prompts)
    shown += rehearsed(run, policy, reference, config, chosen, prompts)
    task.close()
    lines = [
        f"π_θ: {checkpoint.name} of {run.name}; π_ref: {config.model.path}; τ = {config.sampling.temperature:g}.",
        f"Explored answers: {origin}.",
    ]
    path = run / "inspect.html"
    path.write_text(page(run.name, lines, shown, data, policy.tokenizer, chosen.name), encoding="utf-8")
    return path


def own_divergence(config: Config, name: str) -> Divergence:
    """The generator `name` with the config's settings, or the config's own."""
    loss = config.loss
    name = name or (loss.divergence if loss.divergence != "none" else "js")
    return make_divergence(name, alpha=loss.alpha, skew=loss.skew, divergence_form=loss.divergence_form)


def explored_answers(
    run: Path, policy: Policy, data: PromptSet, config: Config, prompts: int
) -> tuple[list[Rollout], str]:
    """Whole groups of answers, one after another, and where they come from."""
    recorded = sorted((run / "rollouts").glob("step-*.safetensors"), key=lambda path: int(path.stem[5:]))
    if recorded:
        tensors = load_file(recorded[-1])
        parts = {key.removeprefix("rollouts."): x for key, x in tensors.items() if key.startswith("rollouts.")}
        return unpack(parts), f"those recorded in {recorded[-1].stem}"
    first = data.prompts[:prompts]
    size = config.train.responses_per_prompt
    settings = sampling_settings(config, policy, EVALUATE)
    stream = answer(policy, PromptSet(data.task, first), [range(size)] * len(first), settings)
    found = sorted((given.rollout for given in stream), key=lambda r: (r.prompt, r.sample))
    return found, f"{size} to each of the first {len(first)} training prompts, written for this page"


def judged(
    rollouts: list[Rollout],
    policy: Policy,
    reference: Policy,
    data: PromptSet,
    config: Config,
    divergence: Divergence,
    prompts: int,
) -> list[Shown]:
    """The first prompts' explored answers: graded, with the advantages of their groups, and scored."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    groups = torch.arange(len(rollouts)) // config.train.responses_per_prompt
    advantages = group_advantages(rewards, groups, config.loss.advantage_std).tolist()
    size = prompts * config.train.responses_per_prompt
    rollouts, advantages = rollouts[:size], advantages[:size]
    asked = {prompt.index: prompt for prompt in data.prompts}
    texts = [(asked[rollout.prompt], policy.tokenizer.decode(rollout.tokens)) for rollout in rollouts]
    right = [reward.outcome == "right" for reward in data.task.rewards(texts)]
    log_theta, log_ref = (scored(each, rollouts, config) for each in (policy, reference))
    return [
        Shown("explored", rollout, ok, advantage, theta, ref, pull_of(divergence, theta, ref))
        for rollout, ok, advantage, theta, ref in zip(rollouts, right, advantages, log_theta, log_ref, strict=True)
    ]


def rehearsed(
    run: Path, policy: Policy, reference: Policy, config: Config, divergence: Divergence, prompts: int
) -> list[Shown]:
    """The stored answers to the first prompts of D_pef, scored; none where the run stored none."""
    path = run / "presample" / "rehearsal.safetensors"
    stored = unpack(load_file(path)) if path.is_file() else []
    first = list(dict.fromkeys(rollout.prompt for rollout in stored))[:prompts]
    stored = [rollout for rollout in stored if rollout.prompt in first]
    if not stored:
        return []
    log_theta, log_ref = (scored(each, stored, config) for each in (policy, reference))
    return [
        Shown("rehearsal", rollout, True, None, theta, ref, pull_of(divergence, theta, ref))
        for rollout, theta, ref in zip(stored, log_theta, log_ref, strict=True)
    ]


def scored(policy: Policy, rollouts: Sequence[Rollout], config: Config) -> list[list[float]]:
    """The log-probability of each token of each rollout, in the precision in which the run trains."""
    with autocast(policy.model, config.run.dtype):
        scores = score_rollouts(policy.model, rollouts, config.sampling.temperature, config.train.microbatch_tokens)
    return [scored.logprobs for scored in scores]


def pull_of(divergence: Divergence, log_theta: list[float], log_ref: list[float]) -> list[float]:
    """U f'(u) of each token."""
    log_u = torch.tensor(log_theta) - torch.tensor(log_ref)
    pull: list[float] = (saturate(log_u).exp() * divergence.derivative(log_u)).tolist()
    return pull


# ---- the page ----------------------------------------------------------------------------------------------------


def page(
    title: str, lines: list[str], shown: Sequence[Shown], data: PromptSet, tokenizer: Tokenizer, divergence: str
) -> str:
    """The whole HTML file. Every text of the run is escaped."""
    scales, cards = {"all": limits(shown)}, []
    for kind in ("explored", "rehearsal"):
        chosen = [each for each in shown if each.kind == kind]
        scales[kind] = limits(chosen)
        for prompt in dict.fromkeys(each.rollout.prompt for each in chosen):
            answers = [each for each in chosen if each.rollout.prompt == prompt]
            cards.append(card(kind, prompt, answers, data, tokenizer))
    filled = TEMPLATE.read_text(encoding="utf-8")
    filled = filled.replace("{{divergence}}", divergence).replace("{{limits}}", json.dumps(scales))
    filled = filled.replace("{{title}}", html.escape(title))
    filled = filled.replace("{{lines}}", "<br>".join(html.escape(line) for line in lines))
    return filled.replace("{{cards}}", "\n".join(cards))  # last: an answer may hold any text


def limits(shown: Sequence[Shown]) -> dict[str, float]:
    """Where the colour scale of each measure ends, for some of the answers."""
    return {
        "u": limit([x for each in shown for x in each.log_u]),
        "pull": limit([x for each in shown for x in each.pull]),
        "advantage": limit([each.advantage for each in shown if each.advantage is not None]),
    }


def limit(values: Sequence[float]) -> float:
    """The number at which the colour scale of some values ends: few of them lie beyond."""
    sizes = sorted(abs(x) for x in values if math.isfinite(x))
    end = sizes[int(SHADED_FULLY * (len(sizes) - 1))] if sizes else 0.0
    return float(f"{max(end, 1e-3):.3g}")


def card(kind: str, prompt: int, answers: Sequence[Shown], data: PromptSet, tokenizer: Tokenizer) -> str:
    """One prompt and its answers; those that are token for token the same stand there once, with their count."""
    question = next(each for each in data.prompts if each.index == prompt)
    asked = html.escape(question.messages[-1]["content"])
    gold = ", ".join(f"{name}: {value}" for name, value in data.task.record(question).items())
    right = sum(each.right for each in answers)
    counts = Counter(tuple(each.rollout.tokens) for each in answers)
    distinct = {tuple(each.rollout.tokens): each for each in answers}
    found = f"{right} of {len(answers)} right, {len(distinct)} distinct"
    note = html.escape(f"{WORDS[kind]} prompt {prompt}: {found}. {gold}")
    head = f'<p class="prompt">{asked}</p><p class="note">{note}</p>'
    rows = [row(each, counts[tokens], tokenizer) for tokens, each in distinct.items()]
    return f'<section data-kind="{kind}">{head}{"".join(rows)}</section>'


def row(each: Shown, count: int, tokenizer: Tokenizer) -> str:
    """One answer that was given `count` times, a span for each token."""
    verdict = "right" if each.right else "wrong"
    advantage = "" if each.advantage is None else f"{each.advantage:.4g}"
    note = "stored" if each.advantage is None else f"A = {each.advantage:+.2f}".replace("-", "−")
    ended = "" if each.rollout.finished else '<span class="cut">cut at the length limit</span>'
    spans = []
    texts = pieces(tokenizer, each.rollout.tokens)
    for text, token, theta, ref, pull in zip(
        texts, each.rollout.tokens, each.log_theta, each.log_ref, each.pull, strict=True
    ):
        tip = f"token {token}: π_θ {math.exp(theta):.3g}, π_ref {math.exp(ref):.3g}, log u {theta - ref:+.3f}"
        tip += f", u f'(u) {pull:+.3f}"
        values = f'data-u="{theta - ref:.4g}" data-pull="{pull:.4g}"'
        spans.append(f'<span class="t" {values} title="{html.escape(tip)}">{html.escape(text)}</span>')
    badge = f'<span class="badge">{"✓" if each.right else "✗"} {verdict}</span>'
    badge += f'<span class="note">{count} ×</span><span class="note">{note}</span>'
    tokens = f'<span class="tokens">{"".join(spans)}{ended}</span>'
    return f'<div class="answer {verdict}" data-count="{count}" data-advantage="{advantage}">{badge}{tokens}</div>'


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the decoded answer.

    Together they are the decoded text, but for ⟨end⟩ and ⟨number⟩, which stand for tokens that add none: the end token,
    and all but the last of the tokens that make one character.
    """
    texts, before = [], ""
    for count, token in enumerate(tokens, start=1):
        text = tokenizer.decode(tokens[:count])
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or count == len(tokens)
        added = text[len(before) :] if whole else ""
        before = text if whole else before
        name = "end" if token in tokenizer.end_ids else str(token)
        texts.append(added or f"⟨{name}⟩")
    return texts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m dph.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, e.g. runs/quickstart")
    parser.add_argument("--prompts", type=int, default=12, help="the most prompts of each kind (12)")
    parser.add_argument("--divergence", default="", metavar="NAME", help="whose u f'(u); by default the run's own")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.error = fail  # type: ignore[method-assign]  # its own prints the usage, too
    arguments = parser.parse_args()
    work = (arguments.run, arguments.prompts, arguments.divergence)
    to_the_end(lambda: print(f"page: {inspect(*work)}"), arguments.debug)


if __name__ == "__main__":
    main()
