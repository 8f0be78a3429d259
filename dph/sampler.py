"""A batched sampler over the KV cache: many answers to many prompts, and nobody waits for the longest.

How it is fast, a sentence each:
- Each prompt is prefilled once, however many answers it gets; its keys and values are copied to their rows.
- All rows write their next token in one shared cache column; a row knows its first valid column, so prompts of any
  length stand right-aligned side by side and a new one is written so that it ends at the shared column.
- A row that has ended gives its place to a waiting answer; when none waits, to the batch's last row, and it shrinks.
- The cache is only a little wider than it must be. When its columns run out it is laid out anew, without the columns
  that no living row needs and with room for the next COLUMNS steps.
- A token is drawn by inverting the cumulative distribution with one uniform number, without a sort (dph/drawing.py).

The uniforms come from a stream keyed by (stream, prompt, sample), one number a token, so what an answer says does not
depend on the batch it was written in, on the order of the prompts, or on how often a run was resumed. This is exact in
float64; in fp32 about one answer in a thousand differs with other batch shapes (max_rows), in bf16 about half.

Sampling is from softmax(logits / temperature); the log-probabilities returned are of that full softmax, also when
top_p < 1 cuts the tail of what is drawn. Temperature 0 is argmax (scored at temperature 1).
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dph.attention import KVCache
from dph.drawing import draw
from dph.errors import UserError
from dph.graphs import RecordedSteps
from dph.model import Decoder
from dph.rollouts import Rollout
from dph.tasks.base import Prompt

CHECK_EVERY = 8  # steps between looks at who has ended, on a GPU: looking makes it wait
COLUMNS = 32  # the cache's columns are a multiple: a larger one reads more of them unused, a smaller one copies more
RECORDED_COLUMNS = 128  # the same where steps are recorded: a larger one makes fewer recordings
PREFILL_TOKENS = 16384  # most prompt tokens, padding included, of one prefill


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample; `stream` separates the random numbers of one purpose (seed, purpose, step) from all others."""

    stream: tuple[int, ...]
    end_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_rows: int = 64
    graphs: bool = False  # replay recorded steps (dph/graphs.py)


def sample(
    model: Decoder, prompts: Sequence[Prompt], samples: Sequence[Sequence[int]], settings: SamplingSettings
) -> list[Rollout]:
    """All answers, ordered by prompt and sample; arguments and errors as `sample_stream`'s."""
    finished = {(r.prompt, r.sample): r for r in sample_stream(model, prompts, samples, settings)}
    pairs = zip(prompts, samples, strict=True)
    return [finished[prompt.index, number] for prompt, numbers in pairs for number in numbers]


def sample_stream(
    model: Decoder, prompts: Sequence[Prompt], samples: Sequence[Sequence[int]], settings: SamplingSettings
) -> Iterator[Rollout]:
    """Answers in the order in which they end.

    Args:
        prompts: each with its index, which keys the random stream together with the sample's number, and its tokens.
        samples: for each prompt the numbers of the answers wanted.

    Raises: ValueError for an empty prompt or the same (prompt, sample) twice; UserError where logits are not finite.
    """
    waiting: deque[_Job] = deque()
    for prompt, numbers in zip(prompts, samples, strict=True):
        waiting.extend(_Job(prompt, number, more=number != numbers[-1]) for number in numbers)
    if len({(job.prompt.index, job.sample) for job in waiting}) != len(waiting):
        raise ValueError("the same sample of the same prompt is asked for twice")
    if any(not prompt.tokens for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    if not waiting:
        return
    rows = min(settings.max_rows, len(waiting))
    columns = max(len(prompt.tokens) for prompt in prompts) + settings.max_new_tokens
    slots = _Slots(model, rows, columns, settings)
    check_every = 1 if slots.device.type == "cpu" else CHECK_EVERY
    while True:
        yield from slots.collect()
        free = slots.free()
        if waiting and len(free) >= max(1, len(slots.jobs) // 8):  # one prefill for several is cheaper
            count = min(len(free), len(waiting))
            slots.admit(free[:count], [waiting.popleft() for _ in range(count)])
            continue  # a first token may already end an answer
        if len(free) == len(slots.jobs):
            return
        if free and not waiting:
            slots.pack()
        for _ in range(check_every):
            slots.step()


class _Job(NamedTuple):
    """One answer to be written."""

    prompt: Prompt
    sample: int
    more: bool  # whether further answers to this prompt follow


class _Slots:
    """The batch at work: R slots, each a row of the cache in which one answer is written, M tokens at most.

    Over its life a slot holds many answers, one after another. All slots write their next token at one column of the
    cache, `cache.column`; slot r's answer, with its prompt before it, occupies the columns cache.starts[r] up to there:

        columns   0 . . . . . . . . . . column
        slot 0        p p p p a a a a a |        p: prompt, a: answer; the next token goes to |
        slot 1                p p a a a |        an answer that began three steps ago
        slot 2    p p a a a a . . . . . |        ended: writes on unread until another answer takes the slot

    What is left of the lowest start of a living slot is needed by nobody.
    """

    def __init__(self, model: Decoder, rows: int, columns: int, settings: SamplingSettings) -> None:
        """Room for `rows` answers at a time, none of which takes more than `columns` columns with its prompt."""
        self.model = model
        self.settings = settings
        weight = next(model.parameters())
        self.device = weight.device
        limit = settings.max_new_tokens
        self.multiple = RECORDED_COLUMNS if settings.graphs else COLUMNS
        held = cache_columns(columns, self.multiple)
        self.cache = KVCache.empty(model.config, rows, held, weight.dtype, self.device)
        self.recorded = RecordedSteps(model, self.cache) if settings.graphs else None
        self.jobs: list[_Job | None] = [None] * rows  # what each slot is writing
        self.tokens = torch.zeros(rows, limit, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(rows, limit, dtype=torch.float32, device=self.device)
        self.uniforms = torch.zeros(rows, limit, dtype=torch.float64, device=self.device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)  # tokens written
        self.ended = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.end_ids = torch.tensor(settings.end_ids, device=self.device)
        self.prefilled: _Prefilled | None = None  # the last prompt, where answers to it still wait

    def free(self) -> list[int]:
        """Slots without an answer in work."""
        return [slot for slot, job in enumerate(self.jobs) if job is None]

    def collect(self) -> Iterator[Rollout]:
        """Takes out the answers that have ended."""
        done = [slot for slot, ended in enumerate(self.ended.tolist()) if ended and self.jobs[slot] is not None]
        if not done:
            return
        lengths = self.lengths[done].tolist()
        tokens = self.tokens[done, : max(lengths)].tolist()
        logprobs = self.logprobs[done, : max(lengths)].tolist()
        for row, slot in enumerate(done):
            job = self.jobs[slot]
            assert job is not None
            self.jobs[slot] = None
            length = lengths[row]
            answer = tokens[row][:length]
            answer_logprobs = logprobs[row][:length]
            if not all(map(math.isfinite, answer_logprobs)):
                raise UserError(
                    f"the model's logits are not finite after prompt {job.prompt.index} (its answer {job.sample}): "
                    "weights or activations have overflowed"
                )
            finished = answer[-1] in self.settings.end_ids
            yield Rollout(job.prompt.index, job.sample, job.prompt.tokens, answer, answer_logprobs, finished)

    @torch.inference_mode()
    def admit(self, slots: Sequence[int], jobs: Sequence[_Job]) -> None:
        """Gives free slots to waiting answers: prefill their prompts, copy the cache, draw the first token."""
        cache = self.cache
        longest = max(len(job.prompt.tokens) for job in jobs)
        if cache.column < longest:
            self._make_room(longest)
        targets: dict[int, list[int]] = {}  # the slots of each prompt, by its index
        asked: dict[int, Prompt] = {}  # each prompt once, however many answers to it begin
        for slot, job in zip(slots, jobs, strict=True):
            self.jobs[slot] = job
            targets.setdefault(job.prompt.index, []).append(slot)
            asked[job.prompt.index] = job.prompt
        keys = [(*self.settings.stream, job.prompt.index, job.sample) for job in jobs]
        streams = np.stack([_uniforms(key, self.settings.max_new_tokens) for key in keys])
        self.uniforms[list(slots)] = torch.from_numpy(streams).to(self.device)
        logits = []
        prefilled = None
        for prefilled in self._prefill(list(asked.values())):
            mine = targets[prefilled.prompt.index]
            size = len(prefilled.prompt.tokens)
            columns = slice(cache.column - size, cache.column)
            cache.keys[:, mine, :, columns] = prefilled.keys[:, :, :, :size]
            cache.values[:, mine, :, columns] = prefilled.values[:, :, :, :size]
            cache.starts[mine] = cache.column - size
            logits.append(prefilled.logits.expand(len(mine), -1))
        assert prefilled is not None
        self.prefilled = prefilled.copy() if jobs[-1].more else None
        in_order = [slot for mine in targets.values() for slot in mine]  # as their logits are
        index = torch.tensor(in_order, device=self.device)
        self.lengths[index] = 0
        self.ended[index] = False
        self._write(torch.cat(logits), index)

    def _prefill(self, prompts: list[Prompt]) -> Iterator["_Prefilled"]:
        """Keys, values and logits of each prompt, in order; the one that was kept from the last time is not redone."""
        if self.prefilled is not None and prompts[0] is self.prefilled.prompt:
            yield self.prefilled
            prompts = prompts[1:]
        longest = max((len(prompt.tokens) for prompt in prompts), default=1)
        size = max(1, PREFILL_TOKENS // longest)  # prompts prefilled together
        for start in range(0, len(prompts), size):
            chunk = prompts[start : start + size]
            lengths = torch.tensor([len(prompt.tokens) for prompt in chunk], device=self.device)
            tokens = torch.zeros(len(chunk), int(lengths.max()), dtype=torch.int64)
            for row, prompt in enumerate(chunk):
                tokens[row, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
            cache = KVCache.empty(self.model.config, len(chunk), tokens.shape[1], self.cache.keys.dtype, self.device)
            hidden = self.model(tokens.to(self.device), cache)  # (prompts, P, D)
            last = hidden[torch.arange(len(chunk), device=self.device), lengths - 1]  # (prompts, D)
            logits = self.model.logits(last)
            for row, prompt in enumerate(chunk):
                here = slice(row, row + 1)
                yield _Prefilled(prompt, cache.keys[:, here], cache.values[:, here], logits[here])

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every slot; ended ones write on, unread, until they are replaced or packed away."""
        if self.cache.column == self.cache.keys.shape[3]:
            self._make_room()
        places = (self.lengths - 1).clamp(min=0)
        last = self.tokens.gather(1, places[:, None])  # (R, 1)
        if self.recorded is not None:
            logits = self.recorded.logits(last)  # (R, V)
        else:
            logits = self.model.logits(self.model(last, self.cache)[:, 0])
        self._write(logits, None)

    def _write(self, logits: Tensor, index: Tensor | None) -> None:
        """Draws the next token of slots `index` (all of them: None) from their logits and writes it down."""
        rows = torch.arange(len(self.jobs), device=self.device) if index is None else index
        at = self.lengths[rows].clamp(max=self.settings.max_new_tokens - 1)
        uniforms = self.uniforms[rows, at]
        tokens, logprobs = draw(logits, uniforms, self.settings.temperature, self.settings.top_p)
        alive = ~self.ended[rows]
        self.tokens[rows, at] = torch.where(alive, tokens, self.tokens[rows, at])
        self.logprobs[rows, at] = torch.where(alive, logprobs, self.logprobs[rows, at])
        self.lengths[rows] += alive
        full = self.lengths[rows] >= self.settings.max_new_tokens
        self.ended[rows] |= torch.isin(tokens, self.end_ids) | full

    @torch.inference_mode()
    def pack(self) -> None:
        """Drops free slots: living ones from the end of the batch take their places, all others stay where they are.

        Recorded steps keep as many rows as the next power of two, so that there are few recordings.
        """
        cache = self.cache
        living = [slot for slot, job in enumerate(self.jobs) if job is not None]
        size = len(living)
        if self.recorded is not None:
            size = min(len(self.jobs), 2 ** (size - 1).bit_length())
        if size == len(self.jobs):
            return
        order = list(range(size))  # the old slot of each new one
        holes = [slot for slot in order if self.jobs[slot] is None]
        movers = [slot for slot in living if slot >= size]
        for hole, mover in zip(holes, movers, strict=False):
            order[hole] = mover
            cache.keys[:, hole] = cache.keys[:, mover]
            cache.values[:, hole] = cache.values[:, mover]
        cache.keys = cache.keys[:, :size]
        cache.values = cache.values[:, :size]
        self.jobs = [self.jobs[slot] for slot in order]
        index = torch.tensor(order, device=self.device)
        cache.starts[:size] = cache.starts[index]
        cache.starts = cache.starts[:size]
        self.tokens = self.tokens[index]
        self.logprobs = self.logprobs[index]
        self.uniforms = self.uniforms[index]
        self.lengths = self.lengths[index]
        self.ended = self.ended[index]

    def _make_room(self, column: int = 0) -> None:
        """Lays the cache out anew: what living slots need, the next column to write (at least `column`), and room."""
        starts = self.cache.starts.tolist()
        living = [start for start, job in zip(starts, self.jobs, strict=True) if job is not None]
        kept = self.cache.column - min(living, default=self.cache.column)
        column = max(column, kept)
        self.cache.lay_out(kept, column, _round_up(column + self.multiple // 2, self.multiple))


def cache_columns(longest: int, multiple: int = COLUMNS) -> int:
    """The columns of a cache in which no text takes more than `longest` tokens: a multiple of `multiple`."""
    columns = longest + CHECK_EVERY + multiple // 2  # ended slots write on for a while; and see _make_room
    return _round_up(columns, multiple)


def _round_up(columns: int, multiple: int) -> int:
    """The next multiple."""
    return -(-columns // multiple) * multiple


class _Prefilled(NamedTuple):
    """A prompt's share of a prefill."""

    prompt: Prompt
    keys: Tensor  # (layers, 1, kv_heads, columns, head_dim), the prompt's first
    values: Tensor
    logits: Tensor  # (1, V) after its last token

    def copy(self) -> "_Prefilled":
        """The same without the rest of the prefill behind it, which would stay in memory."""
        return _Prefilled(self.prompt, self.keys.clone(), self.values.clone(), self.logits)


def _uniforms(key: tuple[int, ...], count: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """`count` uniform numbers in [0, 1): the counter-based stream that belongs to `key`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)
