"""Rollouts: one answer as token ids with its log-probabilities; batches of them; files of them.

Answers stay token ids from the sampler to the loss: text is never tokenised again. Masks come from lengths, never from
token values, so the padding token may be the end token.

What the answers of a batch have in common, their prompt above all, goes through the model once. `collate` lays a batch
out as a tree of tokens for that: exact, and a saving of most of the work where a prompt has many answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dph.model import Layout


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
    for rollout in rollouts:
        known = len(nodes)
        path = _walk(nodes, [*rollout.prompt_tokens, *rollout.tokens[:-1]])  # nothing follows the last token
        states += path[len(rollout.prompt_tokens) - 1 :]
        if len(nodes) > known:  # else the whole path is the beginning of one that is there
            paths.append(path)
    layout = Layout(*(x.to(device) for x in _layout(paths)))
    tokens = torch.tensor([token for _, token in nodes])
    targets = torch.tensor([token for rollout in rollouts for token in rollout.tokens])
    by_row = (x.to(device) for x in _by_row(rollouts))
    return Batch(tokens.to(device), layout, torch.tensor(states).to(device), targets.to(device), *by_row)


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
    rows = padded(flat, columns < lengths[:, None])  # (R, L)
    # A node's place is where it is met first. There its number is larger than all before it, since that is how nodes
    # are numbered; the padding's 0 never is.
    largest_before = torch.cat([rows.new_full((1,), -1), rows.flatten().cummax(0).values])
    cells = (largest_before[1:] > largest_before[:-1]).nonzero()[:, 0]  # (N,)
    positions = columns.expand_as(rows).flatten()[cells]  # (N,)
    return Layout(positions, rows, cells)


def _by_row(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The tensors of a Batch with a row for each answer, from `mask` on, in its order."""
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    logprobs = [x for rollout in rollouts for x in rollout.logprobs]
    ref_logprobs = [x for rollout in rollouts for x in rollout.ref_logprobs or [0.0] * len(rollout.tokens)]
    tensors = [mask, padded(torch.tensor(logprobs), mask), padded(torch.tensor(ref_logprobs), mask)]
    if tops := [rollout.top for rollout in rollouts if rollout.top is not None]:
        tensors += [padded(torch.cat(parts), mask) for parts in zip(*tops, strict=True)]
    return tensors


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

SINGLE = {"prompt": torch.int64, "sample": torch.int64, "finished": torch.bool, "reward": torch.float64}
RAGGED = {"prompt_tokens": torch.int64, "tokens": torch.int64, "logprobs": torch.float32}


def pack(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Rollouts as tensors for a safetensors file; tokens and log-probabilities end to end."""
    tensors = {}
    for name, dtype in SINGLE.items():
        tensors[name] = torch.tensor([getattr(rollout, name) for rollout in rollouts], dtype=dtype)
    for name, dtype in RAGGED.items():
        tensors[name] = torch.tensor([x for rollout in rollouts for x in getattr(rollout, name)], dtype=dtype)
    tensors["prompt_lengths"] = torch.tensor([len(rollout.prompt_tokens) for rollout in rollouts], dtype=torch.int64)
    tensors["lengths"] = torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.int64)
    if tops := [rollout.top for rollout in rollouts if rollout.top is not None]:
        tensors["top_ids"] = torch.cat([top.ids for top in tops]).int()
        tensors["top_logprobs"] = torch.cat([top.logprobs for top in tops])
        tensors["top_rest"] = torch.cat([top.rest for top in tops])
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> list[Rollout]:
    """The rollouts that `pack` packed."""
    lengths = tensors["lengths"].tolist()
    columns: dict[str, Iterable[Any]] = {name: tensors[name].tolist() for name in SINGLE}
    for name in RAGGED:
        sizes = tensors["prompt_lengths"].tolist() if name == "prompt_tokens" else lengths
        columns[name] = [piece.tolist() for piece in torch.split(tensors[name], sizes)]
    if "top_ids" in tensors:
        stored = (tensors["top_ids"].long(), tensors["top_logprobs"], tensors["top_rest"])
        pieces = [torch.split(tensor, lengths) for tensor in stored]
        columns["top"] = [TopTokens(*parts) for parts in zip(*pieces, strict=True)]
    rows = zip(*columns.values(), strict=True)
    return [Rollout(**dict(zip(columns, row, strict=True))) for row in rows]
