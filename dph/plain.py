"""DPH-RL end to end with nothing clever in it. Read this first.

One prompt at a time, one answer at a time, the whole softmax, a loop over tokens. dph/objective.py computes the same
faster and on real models; tests/test_plain.py holds it to this file, loss and gradient. Not here: stored distributions
(E10), dynamic sampling and the overlong penalty (E9), and what stands in the config beside the paper's method: the dual
clip, an entropy bonus, other aggregations than the mean over tokens, advantages without the standard deviation. The
numbers E1 to E8 are those of docs/equations.md.
Answers are lists of token ids, the end token included: stopping is an action. T is the tokens of one answer, V the
vocabulary.

    python -m examples.toy     trains a tiny model with it, GRPO against DPH-F, within a minute on a CPU
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dph.model import Decoder


@dataclass
class Method:
    """What is to be trained: grpo by default."""

    generator: str = ""  # of `f`; none: no divergence
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
    hidden = model(torch.tensor([tokens]))  # (1, N, D): one row, D the model's width
    logits = model.logits(hidden)[0]  # (N, V)
    return (logits / tau).log_softmax(-1)


def answer_logprobs(model: Decoder, prompt: list[int], tokens: list[int], tau: float) -> Tensor:
    """log pi(o_t | s_t) of an answer's tokens, (T,), with gradient."""
    table = next_token_logprobs(model, prompt + tokens, tau)  # (N, V)
    table = table[len(prompt) - 1 : -1]  # (T, V): before each token of the answer
    chosen = torch.tensor(tokens)[:, None]  # (T, 1)
    return table.gather(1, chosen)[:, 0]


@torch.no_grad()
def sample(
    model: Decoder, prompt: list[int], uniforms: Iterable[float], end: Sequence[int], limit: int, tau: float = 1.0
) -> Answer:
    """One answer, token by token: the first token whose cumulative probability exceeds a uniform number."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for uniform in uniforms:
        table = next_token_logprobs(model, prompt + tokens, tau)[-1]  # (V,)
        cumulative = table.double().exp().cumsum(0)  # (V,)
        token = int((cumulative <= uniform).sum())
        token = min(token, len(table) - 1)  # rounding can leave even the last sum below the uniform number
        tokens.append(token)
        logprobs.append(float(table[token]))
        if token in end or len(tokens) == limit:
            break
    return Answer(prompt, tokens, torch.tensor(logprobs, dtype=torch.float64))


# ---- the divergence --------------------------------------------------------------------------------------------------


def f(u: Tensor, generator: str, setting: float) -> Tensor:
    """E1: f(u) of D_f(pi_theta || pi_ref) = E_{pi_ref}[f(u)], with u = pi_theta / pi_ref, per token.

    Args:
        setting: alpha, or lambda of skew_js.
    """
    if generator == "forward_kl":  # DPH-F
        return u - 1 - u.log()
    if generator == "plain_forward_kl":  # replay: supervised learning on the stored answers
        return -u.log()
    if generator == "reverse_kl":
        return u * u.log() - u + 1
    if generator == "js":  # DPH-JS
        m = (u + 1) / 2  # the mean of both policies, over pi_ref as u is
        return 0.5 * (u * (u / m).log() + (1 / m).log())
    if generator == "alpha":
        alpha = setting
        return (u ** (1 - alpha) - (1 - alpha) * u - alpha) / (alpha * (alpha - 1))
    if generator == "jeffreys":
        return (u - 1) * u.log()
    if generator == "squared_hellinger":
        return (u.sqrt() - 1) ** 2
    if generator == "pearson_chi2":
        return (u - 1) ** 2
    if generator == "neyman_chi2":
        return (u - 1) ** 2 / u
    if generator == "total_variation":
        return 0.5 * (u - 1).abs()
    if generator == "skew_js":
        share = setting
        m = share * u + 1 - share
        return share * u * (u / m).log() - (1 - share) * m.log()
    raise ValueError(f"no generator is called {generator!r}")


def f_prime(u: Tensor, generator: str, setting: float) -> Tensor:
    """f'(u), by autograd, without a gradient of its own."""
    u = u.detach().requires_grad_()
    (slope,) = torch.autograd.grad(f(u, generator, setting).sum(), u)
    return slope


# ---- the terms of the objective, each a value per token, (T,) --------------------------------------------------------


def advantages(rewards: list[float]) -> list[float]:
    """E3: A_i = (r_i - mean) / (std + eps) of one prompt's answers; 0 where all rewards are equal."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = sum(rewards) / count
    variance = sum((r - mean) ** 2 for r in rewards) / count
    std = variance**0.5
    return [(r - mean) / (std + 1e-6) for r in rewards]


def exploration(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E4: -min(rho A, clip(rho) A), no divergence in it."""
    rho = torch.exp(logprobs - answer.logprobs)
    clipped = rho.clamp(1 - method.clip_low, 1 + method.clip_high)
    return -torch.minimum(rho * answer.advantage, clipped * answer.advantage)


def rehearsal(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E5: f(u) on a stored answer. Its logprobs are pi_ref's, stored: no reference model is needed."""
    u = torch.exp(logprobs - answer.logprobs)
    return f(u, method.generator, method.setting)


def penalty(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E2 on the policy's own answers: what has the gradient wanted, which the value's own gradient has not."""
    log_u = logprobs - answer.ref_logprobs
    rho = torch.exp(logprobs - answer.logprobs)
    weight = rho.clamp(max=method.ratio_cap).detach()  # pi_old wrote the answer, pi_theta's mean is wanted
    k3 = torch.exp(-log_u) - 1 + log_u
    if method.estimator == "k3":
        return weight * k3
    if method.estimator == "k3_importance":
        return rho * k3
    slope = f_prime(log_u.exp(), method.generator, method.setting)
    return weight * slope * logprobs


def js_stored_half(logprobs: Tensor, answer: Answer) -> Tensor:
    """E8, first half: 1/2 KL(pi_ref || m), m = (pi_theta + pi_ref) / 2, on a stored answer."""
    u = torch.exp(logprobs - answer.logprobs)
    return 0.5 * torch.log(2 / (1 + u))


def js_own_half(logprobs: Tensor, answer: Answer, method: Method) -> Tensor:
    """E8, second half: what has the gradient of 1/2 KL(pi_theta || m) on an own answer."""
    u = torch.exp(logprobs - answer.ref_logprobs).detach()
    rho = torch.exp(logprobs - answer.logprobs)
    weight = rho.clamp(max=method.ratio_cap).detach()
    slope = torch.log(2 * u / (1 + u)) + 1 / (1 + u)
    return weight * 0.5 * slope * logprobs


# ---- the objective ---------------------------------------------------------------------------------------------------


def total_loss(
    model: Decoder, method: Method, rollouts: list[Answer], stored: list[Answer], pef_rollouts: list[Answer]
) -> Tensor:
    """E6: L = L_exp + eta L_pef, each term a mean over its own tokens.

    Args:
        rollouts: answers to the explored prompts, with advantages.
        stored: pi_ref's right answers to D_pef.
        pef_rollouts: new answers to D_pef's prompts, for E8 alone.
    """
    explored: list[Tensor] = []  # of each answer the values of its tokens, (T,)
    penalised: list[Tensor] = []
    for answer in rollouts:
        logprobs = answer_logprobs(model, answer.prompt, answer.tokens, method.tau)  # (T,)
        explored.append(exploration(logprobs, answer, method))
        if method.generator and method.samples == "own":
            penalised.append(penalty(logprobs, answer, method))

    rehearsed: list[Tensor] = []
    for answer in stored:
        logprobs = answer_logprobs(model, answer.prompt, answer.tokens, method.tau)
        if method.samples == "both":
            rehearsed.append(js_stored_half(logprobs, answer))
        else:
            rehearsed.append(rehearsal(logprobs, answer, method))

    answered_anew: list[Tensor] = []
    for answer in pef_rollouts:
        logprobs = answer_logprobs(model, answer.prompt, answer.tokens, method.tau)
        answered_anew.append(js_own_half(logprobs, answer, method))

    loss_exp = mean_over_tokens(explored)
    loss_pef = mean_over_tokens(penalised) + mean_over_tokens(rehearsed) + mean_over_tokens(answered_anew)
    return loss_exp + method.eta * loss_pef


def mean_over_tokens(values: list[Tensor]) -> Tensor:
    """The mean over all tokens of all answers; 0 where there is no answer."""
    count = sum(len(of_answer) for of_answer in values)
    mean = torch.zeros(())
    for of_answer in values:
        mean = mean + of_answer.sum() / count
    return mean


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
        if not near_perfect:
            d_exp.append(prompt)
            continue
        more = [ask(reference, prompt) for _ in range(stored)]
        if more[0].reward == 1:
            d_pef += [answer for answer in more if answer.reward == 1]
        else:
            d_exp.append(prompt)
    return d_pef, d_exp


def train(
    reference: Decoder, method: Method, d_pef: list[Answer], explored: list[list[int]], ask: Ask, steps: int
) -> Decoder:
    """Step by step: sample, reward, advantage, loss, update. For methods that need no reference model online."""
    model = copy.deepcopy(reference)
    stored = d_pef if method.generator else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        rollouts: list[Answer] = []
        for prompt in explored:
            group = [ask(model, prompt) for _ in range(8)]
            rewards = [answer.reward for answer in group]
            for answer, advantage in zip(group, advantages(rewards), strict=True):
                answer.advantage = advantage
            rollouts += group
        loss = total_loss(model, method, rollouts, stored, pef_rollouts=[])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model
