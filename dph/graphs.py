"""Decode steps of fixed shapes, each recorded once and then replayed: CUDA graphs.

A decode step of a small model is some hundred small kernels. A GPU is done with each sooner than Python can start the
next. A recording holds all of them, and one call starts it. It reads and writes the memory that it was recorded with,
so what changes from step to step is kept in place: the last tokens here, the rest in the KVCache (dph/attention.py).

There is one recording for each number of rows and columns. The sampler keeps these few (see `_Slots.pack`).

The plain form is `model.logits(model(tokens, cache)[:, 0])`. A CPU does just that, through the same memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dph.attention import KVCache
from dph.model import Decoder


class Recording(NamedTuple):
    """One step of R rows."""

    tokens: Tensor  # (R, 1) to be filled before
    play: Callable[[], None]
    logits: Tensor  # (R, V), there after


class RecordedSteps:
    """The decode steps of one model into one cache."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.recordings: dict[tuple[int, int], Recording] = {}  # by rows and columns
        self.logits_of_all: Tensor | None = None  # (R, V) of the first recording: rows only become fewer
        self.pool: Any = None  # the memory between their kernels: they share it, since one plays at a time

    def logits(self, tokens: Tensor) -> Tensor:
        """One step: each row's last token (R, 1) -> logits of its next one (R, V), which the next step overwrites.

        The cache advances by one column.
        """
        shape = (self.cache.keys.shape[1], self.cache.keys.shape[3])
        if shape not in self.recordings:
            self.recordings[shape] = self._record(tokens)
        recording = self.recordings[shape]
        recording.tokens.copy_(tokens)
        recording.play()
        self.cache.column += 1
        return recording.logits

    def _record(self, tokens: Tensor) -> Recording:
        """Runs a step once, so that libraries take their working memory, and records it. It leaves no trace.

        What it writes into the cache's next column, the step itself will overwrite.
        """
        tokens = tokens.clone()
        made = self._step(tokens)
        if self.logits_of_all is None:
            self.logits_of_all = torch.empty_like(made)
        logits = self.logits_of_all[: len(tokens)]  # one memory for all recordings

        def step() -> None:
            logits.copy_(self._step(tokens))

        if not tokens.is_cuda:
            return Recording(tokens, step, logits)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):  # on a stream of its own
            step()
        return Recording(tokens, graph.replay, logits)

    def _step(self, tokens: Tensor) -> Tensor:
        return self.model.logits(self.model.hidden_states(tokens, self.cache)[:, 0])
