"""Rollouts: one answer as token ids with its log-probabilities; batches of them; files of them.

Answers stay token ids from the sampler to the loss: text is never tokenised again. Masks come from lengths, never from
token values, so the padding token may be the end token.

What the answers of a batch have in common, their prompt above all, goes through the model once. `collate` lays a batch
out as a tree of tokens for that: exact, and a saving of most of the work where a prompt has many answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dph.attention import Layout


class TopTokens(NamedTuple):
    """What is stored of a distribution at each of T positions: its K likeliest tokens, and the rest as one."""

    ids: Tensor  # (T, K) int64
    logprobs: Tensor  # (T, K) of these tokens
    rest: Tensor  # (T,) log of the mass of all others


@dataclass
class Rollout:
    """One answer to one prompt."""

    prompt: int  # index of the prompt in its source
    sample: int  # number of the answer among those to this prompt
    prompt_tokens: list[int]
    tokens: list[int]  # the end token is one of them: stopping is an action
    logprobs: list[float]  # of `tokens` under the policy that wrote them, full softmax at the sampling temperature
    finished: bool  # False where the length limit cut it
    reward: float = 0.0
    ref_logprobs: list[float] | None = None  # pi_ref's, where a loss on own samples needs them
    top: "TopTokens | None" = None  # pi_ref's likeliest tokens at each position (E10)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"an answer of {len(self.tokens)} tokens has {len(self.logprobs)} log-probabilities")

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


# ---- batches -----------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Rollouts side by side, B of at most T response tokens, M in all; the model reads N tokens (see `collate`)."""

    tokens: Tensor  # (N,)
    layout: Layout  # where each of the N stands
    states: Tensor  # (M,) which of the N tokens each response token follows
    targets: Tensor  # (M,) the response tokens, row by row
    mask: Tensor  # (B, T) True at response tokens
    logprobs: Tensor  # (B, T) of the policy that wrote them, 0 at padding
    ref_logprobs: Tensor  # (B, T) of pi_ref, 0 at padding and where not known
    top_ids: Tensor | None = None  # (B, T, K) see TopTokens
    top_logprobs: Tensor | None = None  # (B, T, K)
    top_rest: Tensor | None = None  # (B, T)


def collate(rollouts: Sequence[Rollout], device: torch.device | str) -> Batch:
    """Puts rollouts into one Batch on `device`.

    The texts (prompt and answer) become a tree, a prefix tree: two texts share a node as long as they are equal from
    the start. Causal attention gives a token the same state in every text that begins alike, so each node is computed
    once, and texts that say the same, or of which one begins the other, cost nothing more:

        prompt 1 2 3, answers 4 5 and 4 6       nodes 0:1  1:2  2:3  3:4  4:5  5:6
                                                paths 0 1 2 3 4 and 0 1 2 3 5
    """
    nodes: dict[tuple[int, int], int] = {}  # (node before, -1 at the start; token) -> number of the node
    states: list[int] = []
    paths: list[list[int]] = []
    targets: list[int] = []
    for rollout in rollouts:
        known = len(nodes)
        text = [*rollout.prompt_tokens, *rollout.tokens[:-1]]  # nothing follows the last token
        path = _walk(nodes, text)
        if len(nodes) > known:  # else the whole path is the beginning of one that is there
            paths.append(path)
        states += path[len(rollout.prompt_tokens) - 1 :]  # from the prompt's last token on
        targets += rollout.tokens
    layout = _layout(paths)
    mask = _mask(rollouts)  # (B, T)
    batch = Batch(
        tokens=torch.tensor([token for _, token in nodes]).to(device),
        layout=Layout(layout.positions.to(device), layout.rows.to(device), layout.cells.to(device)),
        states=torch.tensor(states).to(device),
        targets=torch.tensor(targets).to(device),
        mask=mask.to(device),
        logprobs=_by_row([rollout.logprobs for rollout in rollouts]).to(device),
        ref_logprobs=_by_row([_reference(rollout) for rollout in rollouts]).to(device),
    )
    tops = [rollout.top for rollout in rollouts if rollout.top is not None]
    if not tops:
        return batch
    return batch._replace(
        top_ids=padded(torch.cat([top.ids for top in tops]), mask).to(device),
        top_logprobs=padded(torch.cat([top.logprobs for top in tops]), mask).to(device),
        top_rest=padded(torch.cat([top.rest for top in tops]), mask).to(device),
    )


def _walk(nodes: dict[tuple[int, int], int], text: Sequence[int]) -> list[int]:
    """The numbers of a text's nodes, from its first token to its last; those that are new join the tree."""
    path: list[int] = []
    node = -1
    for token in text:
        node = nodes.setdefault((node, token), len(nodes))
        path.append(node)
    return path


def _layout(paths: Sequence[list[int]]) -> Layout:
    """Where each node stands, by the paths to the tree's leaves; nodes are numbered as the paths meet them."""
    lengths = torch.tensor([len(path) for path in paths])
    columns = torch.arange(int(lengths.max()))
    flat = torch.tensor([node for path in paths for node in path])
    mask = columns < lengths[:, None]  # (R, L)
    rows = padded(flat, mask)
    # A node's place is where it is met first. There its number is larger than all before it, since that is how nodes
    # are numbered; the padding's 0 never is.
    largest = rows.flatten().cummax(0).values  # (R L,) so far, this cell included
    largest_before = torch.cat([largest.new_full((1,), -1), largest[:-1]])
    cells = (largest > largest_before).nonzero()[:, 0]  # (N,)
    positions = columns.expand_as(rows).flatten()[cells]  # (N,)
    return Layout(positions, rows, cells)


def _mask(rollouts: Sequence[Rollout]) -> Tensor:
    """(B, T), True at response tokens."""
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])  # (B,)
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _by_row(values: Sequence[Sequence[float]]) -> Tensor:
    """B rows of at most T values as a tensor (B, T), 0 at padding."""
    rows = [torch.tensor(row) for row in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _reference(rollout: Rollout) -> list[float]:
    """pi_ref's log-probabilities; 0 where they are not known."""
    if rollout.ref_logprobs is None:
        return [0.0] * len(rollout.tokens)
    return rollout.ref_logprobs


def padded(flat: Tensor, mask: Tensor) -> Tensor:
    """(M, ...), row by row, to (B, T, ...) with 0 where the mask (B, T) is False."""
    return flat.new_zeros(*mask.shape, *flat.shape[1:]).index_put((mask,), flat)


def group_by_tokens(rollouts: Sequence[Rollout], budget: int) -> list[list[int]]:
    """Indices of rollouts in groups of at most `budget` tokens, padding included; one alone may have more.

    Answers to one prompt stay together, since they share its tokens; texts of like length do, since they pad little.
    """
    longest: dict[tuple[int, ...], int] = {}  # text of each prompt
    for rollout in rollouts:
        prompt = tuple(rollout.prompt_tokens)
        longest[prompt] = max(longest.get(prompt, 0), len(rollout))

    def by_length(index: int) -> tuple[int, tuple[int, ...], int]:
        prompt = tuple(rollouts[index].prompt_tokens)
        return longest[prompt], prompt, len(rollouts[index])

    groups: list[list[int]] = []
    for index in sorted(range(len(rollouts)), key=by_length):
        width = longest[tuple(rollouts[index].prompt_tokens)]
        if not groups or (len(groups[-1]) + 1) * width > budget:
            groups.append([])
        groups[-1].append(index)
    return groups


# ---- files -------------------------------------------------------------------------------------------------------


def pack(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Rollouts as tensors for a safetensors file: of n rollouts (n,), or values of all their tokens end to end."""
    prompt_tokens: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    for rollout in rollouts:
        prompt_tokens += rollout.prompt_tokens
        tokens += rollout.tokens
        logprobs += rollout.logprobs
    tensors = {
        "prompt": torch.tensor([rollout.prompt for rollout in rollouts], dtype=torch.int64),
        "sample": torch.tensor([rollout.sample for rollout in rollouts], dtype=torch.int64),
        "finished": torch.tensor([rollout.finished for rollout in rollouts], dtype=torch.bool),
        "reward": torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        "prompt_lengths": torch.tensor([len(rollout.prompt_tokens) for rollout in rollouts], dtype=torch.int64),
        "lengths": torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.int64),
        "prompt_tokens": torch.tensor(prompt_tokens, dtype=torch.int64),
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32),
    }
    tops = [rollout.top for rollout in rollouts if rollout.top is not None]
    if tops:
        tensors["top_ids"] = torch.cat([top.ids for top in tops]).int()
        tensors["top_logprobs"] = torch.cat([top.logprobs for top in tops])
        tensors["top_rest"] = torch.cat([top.rest for top in tops])
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> list[Rollout]:
    """The rollouts that `pack` packed."""
    prompts = tensors["prompt"].tolist()
    samples = tensors["sample"].tolist()
    finished = tensors["finished"].tolist()
    rewards = tensors["reward"].tolist()
    lengths = tensors["lengths"].tolist()
    prompt_tokens = torch.split(tensors["prompt_tokens"], tensors["prompt_lengths"].tolist())
    tokens = torch.split(tensors["tokens"], lengths)
    logprobs = torch.split(tensors["logprobs"], lengths)
    rollouts: list[Rollout] = []
    for i in range(len(lengths)):
        rollout = Rollout(
            prompt=prompts[i],
            sample=samples[i],
            prompt_tokens=prompt_tokens[i].tolist(),
            tokens=tokens[i].tolist(),
            logprobs=logprobs[i].tolist(),
            finished=finished[i],
            reward=rewards[i],
        )
        rollouts.append(rollout)
    if "top_ids" in tensors:
        ids = torch.split(tensors["top_ids"].long(), lengths)
        top_logprobs = torch.split(tensors["top_logprobs"], lengths)
        rest = torch.split(tensors["top_rest"], lengths)
        for i, rollout in enumerate(rollouts):
            rollout.top = TopTokens(ids[i], top_logprobs[i], rest[i])
    return rollouts
