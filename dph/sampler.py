"""A batched sampler over the KV cache: many answers to many prompts, and nobody waits for the longest.

How it is fast, a sentence each:
- Each prompt is prefilled once, however many answers it gets; its keys and values are copied to their rows.
- All rows write their next token in one shared cache column; a row knows its first valid column, so prompts of any
  length stand right-aligned side by side and a new one is written so that it ends at the shared column.
- A row that has ended gives its place to a waiting answer; when none waits, to the batch's last row, and it shrinks.
- When the columns run out, everything moves left by the columns that no living row needs.
- A token is drawn by inverting the cumulative distribution with one uniform number: sums of blocks of 128 first, then
  inside one block; top_p needs no full sort either, but for rows whose 1,024 likeliest tokens hold less than p.

The uniforms come from a stream keyed by (stream, prompt, sample), one number a token, so what an answer says does not
depend on the batch it was written in, on the order of the prompts, or on how often a run was resumed.

Sampling is from softmax(logits / temperature); the log-probabilities returned are of that full softmax, also when
top_p < 1 cuts the tail of what is drawn. Temperature 0 is argmax (scored at temperature 1).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dph.model import Decoder, KVCache
from dph.rollouts import Rollout

BLOCK = 128  # tokens summed together in the first stage of a draw
NUCLEUS = 1024  # likeliest tokens looked at first for top_p
CHECK_EVERY = 8  # steps between looks at who has ended, on a GPU: looking makes it wait
PREFILL_TOKENS = 16384  # most prompt tokens, padding included, of one prefill


@dataclass(frozen=True)
class Request:
    """Ask for answers number `samples` to one prompt."""

    prompt: int  # index of the prompt; with the sample's number it keys the random stream
    tokens: list[int]
    samples: Sequence[int]


@dataclass(frozen=True)
class Settings:
    """How to sample; `stream` separates the random numbers of one purpose (seed, purpose, step) from all others."""

    stream: tuple[int, ...]
    end_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_rows: int = 64


def sample(model: Decoder, requests: Sequence[Request], settings: Settings) -> list[Rollout]:
    """All answers, ordered by request and sample."""
    finished = {(r.prompt, r.sample): r for r in sample_stream(model, requests, settings)}
    return [finished[request.prompt, number] for request in requests for number in request.samples]


def sample_stream(model: Decoder, requests: Sequence[Request], settings: Settings) -> Iterator[Rollout]:
    """Answers in the order in which they end.

    Raises: ValueError for an empty prompt or the same (prompt, sample) twice.
    """
    keys = [(request.prompt, number) for request in requests for number in request.samples]
    if len(set(keys)) != len(keys):
        raise ValueError("two requests ask for the same sample of the same prompt")
    if any(not request.tokens for request in requests):
        raise ValueError("a prompt needs at least one token")
    waiting = deque((request, number) for request in requests for number in request.samples)
    if not waiting:
        return
    rows, longest = min(settings.max_rows, len(waiting)), max(len(request.tokens) for request in requests)
    room = max(64, settings.max_new_tokens // 2) if len(waiting) > rows else 0  # to run on before everything moves left
    slots = _Slots(model, rows, longest + settings.max_new_tokens + room, settings)
    check_every = 1 if slots.device.type == "cpu" else CHECK_EVERY
    while True:
        yield from slots.collect()
        free = slots.free()
        if waiting and len(free) >= max(1, len(slots.rows) // 8):
            slots.admit(free[: len(waiting)], [waiting.popleft() for _ in range(min(len(free), len(waiting)))])
            continue  # a first token may already end an answer
        if len(free) == len(slots.rows):
            return
        if free and not waiting:
            slots.pack()
        for _ in range(check_every):
            slots.step()


class _Slots:
    """The rows of the batch: their cache, random numbers and what they have written. R rows, M new tokens at most."""

    def __init__(self, model: Decoder, rows: int, columns: int, settings: Settings) -> None:
        self.model, self.settings = model, settings
        weight = next(model.parameters())
        self.device = weight.device
        limit = settings.max_new_tokens
        self.cache = KVCache.empty(model.config, rows, columns, weight.dtype, self.device)
        self.rows: list[tuple[Request, int] | None] = [None] * rows
        self.tokens = torch.zeros(rows, limit, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(rows, limit, dtype=torch.float32, device=self.device)
        self.uniforms = torch.zeros(rows, limit, dtype=torch.float64, device=self.device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)  # tokens written
        self.ended = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.end_ids = torch.tensor(settings.end_ids, device=self.device)
        self.prefilled: tuple[Request, KVCache, Tensor] | None = None  # the last prompt, where answers to it still wait

    def free(self) -> list[int]:
        """Slots without an answer in work."""
        return [slot for slot, row in enumerate(self.rows) if row is None]

    def collect(self) -> Iterator[Rollout]:
        """Takes out the answers that have ended."""
        done = [slot for slot, ended in enumerate(self.ended.tolist()) if ended and self.rows[slot] is not None]
        if not done:
            return
        lengths = self.lengths[done].tolist()
        tokens, logprobs = (x[done, : max(lengths)].tolist() for x in (self.tokens, self.logprobs))
        for slot, row_tokens, row_logprobs, length in zip(done, tokens, logprobs, lengths, strict=True):
            request, number = self.rows[slot] or (None, 0)
            self.rows[slot] = None
            assert request is not None
            row_tokens = row_tokens[:length]
            finished = row_tokens[-1] in self.settings.end_ids
            yield Rollout(request.prompt, number, request.tokens, row_tokens, row_logprobs[:length], finished)

    @torch.inference_mode()
    def admit(self, slots: Sequence[int], rows: Sequence[tuple[Request, int]]) -> None:
        """Gives free slots to waiting answers: prefill their prompts, copy the cache, draw the first token."""
        cache = self.cache
        longest = max(len(request.tokens) for request, _ in rows)
        if cache.column < longest:
            self._move(longest)
        groups: dict[int, tuple[Request, list[int]]] = {}
        for slot, (request, number) in zip(slots, rows, strict=True):
            self.rows[slot] = (request, number)
            groups.setdefault(id(request), (request, []))[1].append(slot)
        keys = [(*self.settings.stream, request.prompt, number) for request, number in rows]
        streams = np.stack([_uniforms(key, self.settings.max_new_tokens) for key in keys])
        self.uniforms[list(slots)] = torch.from_numpy(streams).to(self.device)
        logits = []
        for request, source, row, row_logits in self._prefill([request for request, _ in groups.values()]):
            targets, size = groups[id(request)][1], len(request.tokens)
            columns = slice(cache.column - size, cache.column)
            cache.keys[:, targets, :, columns] = source.keys[:, row : row + 1, :, :size]
            cache.values[:, targets, :, columns] = source.values[:, row : row + 1, :, :size]
            cache.starts[targets] = cache.column - size
            logits.append(row_logits.expand(len(targets), -1))
        last, number = rows[-1]
        self.prefilled = None
        if number != last.samples[-1]:  # more answers to this prompt are waiting
            kept = slice(row, row + 1)
            source = KVCache(source.keys[:, kept].clone(), source.values[:, kept].clone(), source.starts[kept])
            self.prefilled = (last, source, row_logits)
        index = torch.tensor([slot for _, targets in groups.values() for slot in targets], device=self.device)
        self.lengths[index], self.ended[index] = 0, False
        self._first_column()
        self._write(torch.cat(logits), index)

    def _prefill(self, requests: list[Request]) -> Iterator[tuple[Request, KVCache, int, Tensor]]:
        """For each request its cache, its row there and the logits (1, V) after its last token."""
        if self.prefilled is not None and requests[0] is self.prefilled[0]:
            yield self.prefilled[0], self.prefilled[1], 0, self.prefilled[2]
            requests = requests[1:]
        size = max(1, PREFILL_TOKENS // max((len(r.tokens) for r in requests), default=1))
        for chunk in (requests[i : i + size] for i in range(0, len(requests), size)):
            lengths = torch.tensor([len(r.tokens) for r in chunk], device=self.device)
            tokens = torch.zeros(len(chunk), int(lengths.max()), dtype=torch.int64)
            for row, request in enumerate(chunk):
                tokens[row, : len(request.tokens)] = torch.tensor(request.tokens)
            cache = KVCache.empty(self.model.config, len(chunk), tokens.shape[1], self.cache.keys.dtype, self.device)
            hidden = self.model(tokens.to(self.device), cache)  # (prompts, P, D)
            logits = self.model.logits(hidden[torch.arange(len(chunk), device=self.device), lengths - 1])
            for row, request in enumerate(chunk):
                yield request, cache, row, logits[row : row + 1]

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row; ended rows write on, unread, until they are replaced or packed away."""
        if self.cache.column == self.cache.keys.shape[3]:
            self._first_column()
            self._move(self.cache.column - self.cache.first)
        last = self.tokens.gather(1, (self.lengths - 1).clamp(min=0)[:, None])  # (R, 1)
        hidden = self.model(last, self.cache)[:, 0]  # (R, D)
        self._write(self.model.logits(hidden), None)

    def _write(self, logits: Tensor, index: Tensor | None) -> None:
        """Draws the next token of rows `index` (all rows: None) from their logits and writes it down."""
        rows = torch.arange(len(self.rows), device=self.device) if index is None else index
        at = self.lengths[rows].clamp(max=self.settings.max_new_tokens - 1)
        tokens, logprobs = draw(logits, self.uniforms[rows, at], self.settings.temperature, self.settings.top_p)
        alive = ~self.ended[rows]
        self.tokens[rows, at] = torch.where(alive, tokens, self.tokens[rows, at])
        self.logprobs[rows, at] = torch.where(alive, logprobs, self.logprobs[rows, at])
        self.lengths[rows] += alive
        full = self.lengths[rows] >= self.settings.max_new_tokens
        self.ended[rows] |= torch.isin(tokens, self.end_ids) | full

    @torch.inference_mode()
    def pack(self) -> None:
        """Drops ended rows: living ones from the end of the batch take their places, all others stay where they are."""
        cache, living = self.cache, [slot for slot, row in enumerate(self.rows) if row is not None]
        count, order = len(living), list(range(len(living)))
        holes = [slot for slot in order if self.rows[slot] is None]
        movers = living[count - len(holes) :]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
            for store in (cache.keys, cache.values):
                store[:, hole, :, cache.first : cache.column] = store[:, mover, :, cache.first : cache.column]
        cache.keys, cache.values = cache.keys[:, :count], cache.values[:, :count]
        self.rows, index = [self.rows[slot] for slot in order], torch.tensor(order, device=self.device)
        cache.starts = cache.starts[index]
        for name in ("tokens", "logprobs", "uniforms", "lengths", "ended"):
            setattr(self, name, getattr(self, name)[index])
        self._first_column()

    def _move(self, column: int) -> None:
        """Moves every row so that the next column to write is `column`."""
        cache, width = self.cache, min(self.cache.column - self.cache.first, column)
        for store in (cache.keys, cache.values):
            store[:, :, :, column - width : column] = store[:, :, :, cache.column - width : cache.column].clone()
        cache.starts = (cache.starts + column - cache.column).clamp(min=0)
        cache.column = column
        self._first_column()

    def _first_column(self) -> None:
        """The first column that a row in work needs (ended rows must not hold the others back)."""
        starts = self.cache.starts.tolist()
        self.cache.first = min((s for s, row in zip(starts, self.rows, strict=True) if row), default=self.cache.column)
        self.cache.starts.clamp_(min=self.cache.first)


def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under the full softmax.

    Args:
        logits: (R, V), any floating type.
        uniforms: (R,) float64 in [0, 1).

    Returns: tokens (R,) int64, log-probabilities (R,) of softmax(logits / temperature).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs = torch.softmax(logits if temperature in (0, 1) else logits / temperature, dim=-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    elif top_p < 1:
        tokens = _draw_nucleus(probs, uniforms, top_p)
    else:
        tokens = inverse_cdf(probs, uniforms)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log().float()


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index at which the cumulative weight exceeds uniform * total: weights (R, V) >= 0, uniforms (R,)."""
    rows, size = weights.shape
    padding = -size % BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).view(rows, -1, BLOCK)  # (R, V / 128, 128)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    block, rest = _search(cumulative, uniforms * cumulative[:, -1])
    inside = blocks[torch.arange(rows, device=weights.device), block].double().cumsum(-1)
    return block * BLOCK + _search(inside, rest)[0]


def _search(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index with cumulative > target, never one without weight, and the target's distance from its start."""
    target = torch.minimum(target, cumulative[:, -1] * (1 - 1e-15))[:, None]  # rounding must not step over the end
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)
    before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index[:, 0], (target - before)[:, 0]


def _draw_nucleus(probs: Tensor, uniforms: Tensor, top_p: float, look_at: int = NUCLEUS) -> Tensor:
    """Draws from the smallest set of likeliest tokens whose mass reaches top_p; looks at all where `look_at` do not."""
    top, ids = probs.topk(min(look_at, probs.shape[1]), dim=-1)
    tokens = ids.gather(1, inverse_cdf(nucleus(top, top_p), uniforms)[:, None])[:, 0]
    short = (top.sum(-1) < top_p).nonzero()[:, 0]
    if len(short) and top.shape[1] < probs.shape[1]:
        tokens[short] = _draw_nucleus(probs[short], uniforms[short], top_p, probs.shape[1])
    return tokens


def nucleus(sorted_probs: Tensor, top_p: float) -> Tensor:
    """Descending probabilities (R, K), zero where those before already hold top_p; the first always stays."""
    before = sorted_probs.double().cumsum(-1) - sorted_probs
    return torch.where(before < top_p, sorted_probs, 0.0)


def _uniforms(key: tuple[int, ...], count: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """`count` uniform numbers in [0, 1): the counter-based stream that belongs to `key`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)
