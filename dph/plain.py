"""DPH-RL end to end with nothing clever in it. Read this first.

One prompt at a time, one answer at a time, the whole softmax, a loop over tokens. dph/objective.py computes the same
faster and on real models; tests/test_plain.py holds it to this file, loss and gradient. Not here: stored distributions
(E10), the dual clip, other aggregations than the mean over tokens. The numbers E1 to E8 are those of docs/equations.md.
Answers are lists of token ids, the end token included: stopping is an action.

    python -m examples.toy     trains a tiny model with it, GRPO against DPH-F, within a minute on a CPU
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dph.model import Decoder

# E1. A divergence is D_f(pi_theta || pi_ref) = E_{pi_ref}[f(u)], with u = pi_theta / pi_ref, per token.
GENERATORS: dict[str, Callable[[Tensor, float], Tensor]] = {  # f(u), and the setting that alpha and skew_js take
    "forward_kl": lambda u, _: u - 1 - u.log(),  # DPH-F
    "plain_forward_kl": lambda u, _: -u.log(),  # replay: supervised learning on the stored answers
    "reverse_kl": lambda u, _: u * u.log() - u + 1,
    "js": lambda u, _: 0.5 * (u * (2 * u / (1 + u)).log() + (2 / (1 + u)).log()),  # DPH-JS
    "alpha": lambda u, a: (u ** (1 - a) - (1 - a) * u - a) / (a * (a - 1)),
    "jeffreys": lambda u, _: (u - 1) * u.log(),
    "squared_hellinger": lambda u, _: (u.sqrt() - 1) ** 2,
    "pearson_chi2": lambda u, _: (u - 1) ** 2,
    "neyman_chi2": lambda u, _: (u - 1) ** 2 / u,
    "total_variation": lambda u, _: 0.5 * (u - 1).abs(),
    "skew_js": lambda u, w: w * u * (u / (w * u + 1 - w)).log() - (1 - w) * (w * u + 1 - w).log(),
}


@dataclass
class Method:
    """What is to be trained: grpo by default."""

    generator: str = ""  # of E1; none: no divergence
    samples: str = "stored"  # E5: stored answers; "own": a penalty on the rollouts (E2); "both": js by E8
    estimator: str = "exact"  # of a penalty: "exact", "k3", "k3_importance"
    eta: float = 0.0
    setting: float = 0.5  # alpha or lambda of the generator
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 2.0  # of importance weights on own answers
    tau: float = 1.0  # sampling temperature


@dataclass
class Answer:
    """One answer to one prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Tensor  # (T,) of the policy that wrote it: pi_old for a rollout, pi_ref for a stored answer
    ref_logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))  # (T,) where E2 or E8 needs them
    reward: float = 0.0
    advantage: float = 0.0


# ---- the policy ------------------------------------------------------------------------------------------------------


def next_token_logprobs(model: Decoder, tokens: list[int], tau: float) -> Tensor:
    """log pi(. | tokens so far) after each of N tokens, (N, V): the whole vocabulary, at the sampling temperature."""
    logits = model.logits(model(torch.tensor([tokens])))[0]  # (N, V)
    return (logits / tau).log_softmax(-1)


def answer_logprobs(model: Decoder, prompt: list[int], tokens: list[int], tau: float) -> Tensor:
    """log pi(o_t | s_t) of an answer's tokens, (T,), with gradient."""
    table = next_token_logprobs(model, prompt + tokens, tau)[len(prompt) - 1 : -1]  # (T, V)
    return table.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def sample(
    model: Decoder, prompt: list[int], uniforms: Iterable[float], end: Sequence[int], limit: int, tau: float = 1.0
) -> Answer:
    """One answer, token by token: the first token whose cumulative probability exceeds a uniform number."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for uniform in uniforms:
        table = next_token_logprobs(model, prompt + tokens, tau)[-1]  # (V,)
        token = int((table.double().exp().cumsum(0) <= uniform).sum().clamp(max=len(table) - 1))
        tokens.append(token)
        logprobs.append(float(table[token]))
        if token in end or len(tokens) == limit:
            break
    return Answer(prompt, tokens, torch.tensor(logprobs, dtype=torch.float64))


# ---- the objective ---------------------------------------------------------------------------------------------------


def advantages(rewards: list[float]) -> list[float]:
    """E3: A_i = (r_i - mean) / (std + eps) of one prompt's answers; 0 where all rewards are equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [0.0 if max(rewards) == min(rewards) else (r - mean) / (std + 1e-6) for r in rewards]


def exploration(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E4: -min(rho A, clip(rho) A) per token, (T,), no divergence in it."""
    rho = torch.exp(logprobs - answer.logprobs)
    clipped = rho.clamp(1 - method.clip_low, 1 + method.clip_high)
    return -torch.minimum(rho * answer.advantage, clipped * answer.advantage)


def rehearsal(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E5: f(u) per token of a stored answer, (T,). Its logprobs are pi_ref's, stored: no reference model is needed."""
    u = torch.exp(logprobs - answer.logprobs)
    return GENERATORS[method.generator](u, method.setting)


def penalty(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E2 on the policy's own answers, (T,): what has the gradient wanted, which the value's own gradient has not."""
    log_u = logprobs - answer.ref_logprobs
    rho = torch.exp(logprobs - answer.logprobs)
    k3 = torch.exp(-log_u) - 1 + log_u
    if method.estimator == "k3":
        return rho.clamp(max=method.ratio_cap).detach() * k3
    if method.estimator == "k3_importance":
        return rho * k3
    u = log_u.exp().detach().requires_grad_()
    (slope,) = torch.autograd.grad(GENERATORS[method.generator](u, method.setting).sum(), u)  # f'(u)
    return rho.clamp(max=method.ratio_cap).detach() * slope * logprobs


def js_stored_half(logprobs: Tensor, answer: Answer) -> Tensor:
    """E8, first half: 1/2 KL(pi_ref || m), m = (pi_theta + pi_ref) / 2, on a stored answer, (T,)."""
    u = torch.exp(logprobs - answer.logprobs)
    return 0.5 * torch.log(2 / (1 + u))


def js_own_half(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E8, second half: what has the gradient of 1/2 KL(pi_theta || m) on an own answer, (T,)."""
    u = torch.exp(logprobs - answer.ref_logprobs).detach()
    weight = torch.exp(logprobs - answer.logprobs).clamp(max=method.ratio_cap).detach()
    return weight * 0.5 * (torch.log(2 * u / (1 + u)) + 1 / (1 + u)) * logprobs


def total_loss(
    model: Decoder, method: Method, rollouts: list[Answer], stored: list[Answer], pef_rollouts: list[Answer]
) -> Tensor:
    """E6: L = L_exp + eta L_pef, each a mean over its own tokens.

    Args:
        rollouts: answers to the explored prompts, with advantages; stored: pi_ref's right answers to D_pef;
        pef_rollouts: new answers to D_pef's prompts, for E8 alone.
    """
    loss_exp = loss_pef = torch.zeros(())
    for answer in rollouts:
        logprobs = answer_logprobs(model, answer.prompt, answer.tokens, method.tau)  # (T,)
        count = sum(len(each.tokens) for each in rollouts)
        loss_exp = loss_exp + exploration(logprobs, answer, method).sum() / count
        if method.generator and method.samples == "own":
            loss_pef = loss_pef + penalty(logprobs, answer, method).sum() / count
    for answer in stored:
        logprobs = answer_logprobs(model, answer.prompt, answer.tokens, method.tau)
        half = method.samples == "both"
        values = js_stored_half(logprobs, answer) if half else rehearsal(logprobs, answer, method)
        count = sum(len(each.tokens) for each in stored)
        loss_pef = loss_pef + values.sum() / count
    for answer in pef_rollouts:
        logprobs = answer_logprobs(model, answer.prompt, answer.tokens, method.tau)
        count = sum(len(each.tokens) for each in pef_rollouts)
        loss_pef = loss_pef + js_own_half(logprobs, answer, method).sum() / count
    return loss_exp + method.eta * loss_pef


# ---- the method ------------------------------------------------------------------------------------------------------

Ask = Callable[[Decoder, list[int]], Answer]  # samples one answer to a prompt, and sets its reward


def presample(
    reference: Decoder, prompts: list[list[int]], ask: Ask, stored: int = 8
) -> tuple[list[Answer], list[list[int]]]:
    """E7: a prompt is near-perfect if all of eight answers are right, and in D_pef if the next one is right, too.

    Returns: D_pef's right answers among that one and the `stored` - 1 after it; the prompts of D_exp, all others.
    """
    d_pef: list[Answer] = []
    d_exp: list[list[int]] = []
    for prompt in prompts:
        near_perfect = all(ask(reference, prompt).reward == 1 for _ in range(8))
        more = [ask(reference, prompt) for _ in range(stored)] if near_perfect else []
        if more and more[0].reward == 1:
            d_pef += [answer for answer in more if answer.reward == 1]
        else:
            d_exp.append(prompt)
    return d_pef, d_exp


def train(
    reference: Decoder, method: Method, d_pef: list[Answer], explored: list[list[int]], ask: Ask, steps: int
) -> Decoder:
    """Step by step: sample, reward, advantage, loss, update. For methods that need no reference model online."""
    model = copy.deepcopy(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        rollouts: list[Answer] = []
        for prompt in explored:
            group = [ask(model, prompt) for _ in range(8)]
            for answer, advantage in zip(group, advantages([a.reward for a in group]), strict=True):
                answer.advantage = advantage
            rollouts += group
        loss = total_loss(model, method, rollouts, d_pef if method.generator else [], [])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model
