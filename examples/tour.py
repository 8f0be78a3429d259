"""From a prompt to an update in twelve stops, with real tensors: python -m examples.tour > docs/tour.md

Works on the miniature's base model, which is trained if it is not there yet.
"""

import torch
from torch import Tensor

from dph import losses
from dph.answering import PRESAMPLE, TRAIN, Answer, Policy, answer, sampling_settings, score_rollouts
from dph.cli import load_policy, open_task, set_up
from dph.config import Config, load_config
from dph.divergences import make_divergence
from dph.prompts import PromptSet, tokenize
from dph.rollouts import collate
from dph.scoring import token_logprobs

INTRODUCTION = """# A tour: from a prompt to an update in twelve stops

Every number below was printed by `python -m examples.tour > docs/tour.md` on the miniature's base model; a test runs
the same script. B is rows (answers), T response positions. Read it beside [equations.md](equations.md)."""


OWN = '''### A divergence of your own
One function in [divergences.py](../dph/divergences.py) returns (f(u), f'(u)) of log u; configs (`loss.divergence =
"vincze_le_cam"`), tests of every generator and the pictures find it by its name.
```python
@generator("vincze_le_cam")
def vincze_le_cam(log_u: Tensor) -> Pair:
    """f(u) = (u - 1)^2 / (u + 1): sum of (pi_theta - pi_ref)^2 / (pi_theta + pi_ref)."""
    u = torch.exp(log_u)
    return (u - 1) ** 2 / (u + 1), 1 - 4 / (u + 1) ** 2
```'''


def show(name: str, value: Tensor, digits: int = 3) -> None:
    """One line: name, shape, the first values of the first rows."""
    first = value.detach()[:2, :8] if value.ndim == 2 else value.detach()[None, :8]
    rows = [[round(x, digits) for x in row] for row in first.tolist()]
    print(f"{name} {tuple(value.shape)}: " + "; ".join(map(str, rows)))


def stop(number: int, title: str, text: str) -> None:
    """A heading, a sentence, and the start of a block of printed tensors."""
    print(f"\n## {number}. {title}\n{text}\n```")


def ask(policy: Policy, data: PromptSet, config: Config, index: int, purpose: int) -> list[Answer]:
    """Eight judged answers to prompt `index`, in order."""
    prompts = [prompt for prompt in data.prompts if prompt.index == index]
    settings = sampling_settings(config, policy, purpose)
    found = answer(policy, PromptSet(data.task, prompts), [range(8)], settings)
    return sorted(found, key=lambda a: a.rollout.sample)


def tour(policy: Policy, data: PromptSet, config: Config) -> None:
    """Prints all stops."""
    print(INTRODUCTION)
    counts = {p.index: ask(policy, data, config, p.index, PRESAMPLE) for p in data.prompts}
    correct = {index: int(sum(a.reward.value for a in answers)) for index, answers in counts.items()}
    pef = max(correct, key=lambda i: correct[i])
    exp = min(correct, key=lambda i: abs(correct[i] - 4))
    answers = ask(policy, data, config, exp, TRAIN)
    exploration(policy, data, config, exp, correct, answers)
    rehearsal(policy, config, answers, [a for a in counts[pef] if a.reward.value == 1])
    print("\nThe loop that does this for many prompts is `train_step` in [trainer.py](../dph/trainer.py).\n")
    print(OWN)


def exploration(
    policy: Policy, data: PromptSet, config: Config, exp: int, correct: dict[int, int], answers: list[Answer]
) -> None:
    """Stops 1 to 7: a prompt of D_exp."""
    prompt = next(prompt for prompt in data.prompts if prompt.index == exp)
    stop(1, "A prompt", "A task gives messages and a gold answer; the policy never sees the latter.")
    print(f"messages: {prompt.messages[-1]['content']}\nmeta: {prompt.meta}\n```")
    stop(2, "Tokens", "The chat template and the tokenizer make ids, once; answers stay ids from here to the loss.")
    print(f"{len(prompt.tokens)} tokens: {prompt.tokens}\n```")
    stop(3, "Pre-sampling", "The initial policy answers every training prompt k = 8 times (E7); the first 40 prompts:")
    near_perfect = [i for i, c in correct.items() if c == 8]
    print(f"correct of 8: {list(correct.values())}\nnear-perfect at 8 of 8: {near_perfect}\n```")
    stop(4, "A group of answers", "A prompt of D_exp is answered G = 8 times by the policy in training.")
    print("\n".join(f"{a.reward.value:.0f}  {a.text}" for a in answers) + "\n```")
    rewards = torch.tensor([a.reward.value for a in answers])
    advantages = losses.group_advantages(rewards, torch.zeros(8, dtype=torch.int64))
    stop(5, "Rewards and advantages", "A = (r − mean)/(std + ε) within the group (E3, `losses.group_advantages`).")
    show("rewards", rewards)
    show("advantages", advantages)
    batch = collate([a.rollout for a in answers], "cpu")
    logprobs, entropy, *_ = token_logprobs(policy.model, batch, config.sampling.temperature, entropy=True)
    print("```")
    stop(6, "Scores", "One function scores π_θ, π_old and π_ref (`scoring.token_logprobs`); before an update ρ = 1.")
    show("log pi_theta", logprobs)
    show("rho", torch.exp(logprobs - batch.logprobs) * batch.mask, 5)
    show("entropy", entropy)
    values = losses.clipped_loss(logprobs, batch.logprobs, advantages, batch.mask, 0.2, 0.28)
    print("```")
    stop(7, "Exploration loss", "−min(ρA, clip(ρ)A) per token (E4, `losses.clipped_loss`), no divergence.")
    show("values", values)
    total = losses.denominator(batch.mask.sum(1), "token-mean")
    print(
        f"L_exp = {losses.aggregate(values, batch.mask, 'token-mean', total).item():.5f} over {total:.0f} tokens\n```"
    )


def rehearsal(policy: Policy, config: Config, answers: list[Answer], stored: list[Answer]) -> None:
    """Stops 8 to 12: stored answers of D_pef, and the update."""
    model, tau, eta = policy.model, config.sampling.temperature, config.loss.eta
    kept = [a.rollout for a in stored]
    for rollout, scored in zip(kept, score_rollouts(model, kept, tau, 4096), strict=True):
        rollout.logprobs = scored.logprobs
    stop(8, "Stored answers", "What π_ref got right on a prompt of D_pef is kept with its log-probabilities (E5).")
    print("\n".join(dict.fromkeys(a.text for a in stored)) + "\n```")
    batch, divergence = collate(kept, "cpu"), make_divergence("js")
    logprobs = token_logprobs(model, batch, tau).logprobs
    stop(9, "u at the start", "u = π_θ/π_ref is 1 before training: the rehearsal loss and its gradient are 0.")
    show("u", torch.exp(logprobs - batch.logprobs) * batch.mask, 5)
    print(f"L_pef = {losses.rehearsal_loss(logprobs, batch.logprobs, batch.mask, divergence).sum().item():.2e}\n```")
    explored = collate([a.rollout for a in answers], "cpu")
    rewards = torch.tensor([a.reward.value for a in answers])
    advantages = losses.group_advantages(rewards, torch.zeros(8, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(3):
        new = token_logprobs(model, explored, tau).logprobs
        values = losses.clipped_loss(new, explored.logprobs, advantages, explored.mask, 0.2, 0.28)
        losses.aggregate(values, explored.mask, "token-mean", float(explored.mask.sum())).backward()
        optimizer.step()
        optimizer.zero_grad()
    logprobs = token_logprobs(model, batch, tau).logprobs
    stop(10, "Drift", "Three large steps of exploration alone, and answers that nobody asked about have moved.")
    show("u", torch.exp(logprobs - batch.logprobs) * batch.mask, 5)
    values = losses.rehearsal_loss(logprobs, batch.logprobs, batch.mask, divergence)
    show("f(u)", values, 5)
    total = float(batch.mask.sum())
    loss = losses.aggregate(values, batch.mask, "token-mean", total)
    print("```")
    stop(
        11, "Rehearsal loss", "Autograd through f(u) weighs ∇log π_θ by u f'(u) (E2): negative where a token was lost."
    )
    show(
        "u f'(u)", (logprobs - batch.logprobs).exp() * divergence.derivative(logprobs - batch.logprobs) * batch.mask, 5
    )
    print(f"L_pef = {loss.item():.6f}, eta L_pef = {eta * loss.item():.6f}\n```")
    (eta * loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=5e-3).step()
    after = losses.rehearsal_loss(token_logprobs(model, batch, tau).logprobs, batch.logprobs, batch.mask, divergence)
    stop(
        12,
        "The update",
        "Clip, a small step down this gradient alone, and the divergence has fallen; the trainer adds L_exp (E6).",
    )
    print(
        f"gradient norm {norm.item():.4f}\nL_pef before {loss.item():.6f}, after {after.sum().item() / total:.6f}\n```"
    )


if __name__ == "__main__":
    config = load_config("configs/miniature_dph_js.toml")
    policy = load_policy(config.model.path, config, set_up(config))
    tour(policy, tokenize(open_task("miniature:train?count=40", config), policy.tokenizer, config), config)
