"""Who attends to whom: the rotation of queries and keys, causal attention, and two ways to lay texts out for it.

`Layout` is for training and scoring: texts that begin alike are one tree, and nothing is padded. `KVCache`, with a
`Window` of it for each layer, is for sampling: what earlier tokens left behind is read, not computed again.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dph.model_config import ModelConfig

Device = torch.device | str
SHORT = 256  # longest row, in tokens, whose probabilities are kept for the backward pass, see `causal`


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its angle. `sin` carries the sign: its first half is negated."""
    partner = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, partner, sin)  # x cos + partner sin


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over rows that start at position 0: q (B, T, heads, head_dim), k and v (B, T, kv_heads, head_dim)."""
    length = q.shape[1]
    q = q.transpose(1, 2)  # (B, heads, T, head_dim)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    if q.is_cpu and compute_dtype(q) == torch.bfloat16 and length <= SHORT:
        # The fused kernel's backward pass in bf16 is several times as slow as the plain form (docs/performance.md).
        group = q.shape[1] // k.shape[1]  # query heads of one kv head
        grouped = q.reshape(*k.shape[:2], group * length, -1)  # as many query positions: no key or value is replicated
        hidden = torch.full((length, length), -torch.inf, dtype=torch.bfloat16).triu(1).repeat(group, 1)
        out = two_products(grouped, k, v, hidden).view_as(q)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def two_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q · k / sqrt(head_dim) + mask) · v: the plain form, which keeps the probabilities.

    Args:
        q: (B, kv_heads, T, head_dim).
        k, v: (B, kv_heads, S, head_dim).
        mask: to add, broadcasts to (B, kv_heads, T, S).

    Returns: (B, kv_heads, T, head_dim).
    """
    products = torch.matmul(q, k.mT)  # (B, kv_heads, T, S)
    scores = products * q.shape[-1] ** -0.5 + mask
    return torch.matmul(scores.softmax(-1), v)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which products with x are computed: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Layout(NamedTuple):
    """N tokens as the nodes of a tree: texts that begin alike share what they have in common, and nothing is padded.

    Everything but attention works on single tokens, so it runs on the N nodes. Attention needs whole texts: `attend`
    spreads the nodes out to rows, and collects each node's result from one of the rows that it stands in.
    """

    positions: Tensor  # (N,) of each token in its texts
    rows: Tensor  # (R, L) the tokens of each text from its start, for attention; 0 where padded on the right
    cells: Tensor  # (N,) one place of each token in `rows`, end to end

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, heads, head_dim), k and v (N, kv_heads, head_dim) -> (N, heads, head_dim)."""
        # F.embedding is indexing by `rows` whose backward pass sums a node's gradients from all its rows at once;
        # q, k and v go through it side by side, as one row of numbers a node.
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        side_by_side = torch.cat((q, k, v), 1).flatten(1)  # (N, (heads + 2 kv_heads) head_dim)
        rows = F.embedding(self.rows, side_by_side)  # (R, L, (heads + 2 kv_heads) head_dim)
        by_head = rows.unflatten(2, (-1, head_dim))  # type: ignore[no-untyped-call]
        row_q, row_k, row_v = by_head.split((heads, kv_heads, kv_heads), 2)
        out = causal(row_q, row_k, row_v)  # (R, L, heads, head_dim)
        # A node stands in several rows with the same past, so with the same result: one of them is enough. Padding on
        # the right is seen by nobody, since attention is causal.
        by_cell = out.flatten(2).flatten(0, 1)  # (R L, heads head_dim)
        return F.embedding(self.cells, by_cell).view_as(q)


class Window(NamedTuple):
    """What one layer reads and writes of a KVCache in one call."""

    keys: Tensor  # (rows, kv_heads, columns, head_dim)
    values: Tensor
    written: Tensor  # (T,) the columns that the call's tokens take
    mask: Tensor | None  # (rows, 1, 1, columns) to add; None in a prefill, which reads its own columns alone

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (rows, T, heads, head_dim), k and v (rows, T, kv_heads, head_dim) -> (rows, T, heads, head_dim)."""
        self.keys.index_copy_(2, self.written, k.transpose(1, 2).to(self.keys.dtype))
        self.values.index_copy_(2, self.written, v.transpose(1, 2).to(self.values.dtype))
        if self.mask is None:
            return causal(q, k, v)
        # The query heads of one kv head become that many query positions: no key or value is replicated.
        grouped = q.reshape(len(q), k.shape[2], -1, q.shape[3])  # (rows, kv_heads, heads / kv_heads, head_dim)
        return self._read(grouped, self.mask).reshape(q.shape)

    def _read(self, q: Tensor, mask: Tensor) -> Tensor:
        """softmax(q · keys / sqrt(head_dim)) · values, for q (rows, kv_heads, positions, head_dim)."""
        if not self.keys.is_cpu:
            return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        # On a CPU the fused kernel makes two tiny products for each row and head; the plain form's two, for all rows
        # and heads together, take half its time where keys and values are contiguous: KVCache.lay_out sees to that.
        return two_products(q, self.keys, self.values, mask)


class KVCache:
    """Keys and values of rows that all write at one column. The owner may re-index rows and set their starts.

    Its memory is taken once, for the most columns that it may have. `keys` and `values` see only as much of it as
    `lay_out` last asked for, without gaps: a step reads these columns all, so the fewer the faster. Where they lie
    follows from rows and columns alone, and `starts` and `here` are changed in place: dph/graphs.py counts on it.
    """

    keys: Tensor  # (layers, rows, kv_heads, columns, head_dim), contiguous in each layer
    values: Tensor  # (layers, rows, kv_heads, columns, head_dim)
    starts: Tensor  # (rows,) int64: first valid column of each row; what lies before is masked, but must be finite
    here: Tensor  # () int64: `column`, on the device

    def __init__(self, memory: Tensor, shape: tuple[int, int, int, int], starts: Tensor) -> None:
        """`memory` (2, layers, numbers of a layer), of which `shape` (rows, kv_heads, columns, head_dim) is seen."""
        self.memory = memory
        self.starts = starts
        self.here = torch.zeros((), dtype=torch.int64, device=starts.device)
        self.column = 0
        self.keys, self.values = self._seen(shape)

    @property
    def column(self) -> int:
        """The next column to write."""
        return self._column

    @column.setter
    def column(self, column: int) -> None:
        self._column = column
        self.here.fill_(column)

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, columns: int, dtype: torch.dtype, device: Device) -> "KVCache":
        """A cache of zeros in which every row starts at column 0."""
        shape = (rows, config.num_key_value_heads, columns, config.head_dim)
        memory = torch.zeros(2, config.num_hidden_layers, math.prod(shape), dtype=dtype, device=device)
        return cls(memory, shape, torch.zeros(rows, dtype=torch.int64, device=device))

    def lay_out(self, kept: int, column: int, columns: int) -> None:
        """Keeps the last `kept` columns, moved so that the next to write is `column`, in a store of `columns`."""
        _, rows, heads, _, dim = self.keys.shape
        keys, values = self._seen((rows, heads, columns, dim))
        source = slice(self.column - kept, self.column)
        target = slice(column - kept, column)
        for layer in range(len(keys)):  # old and new lie in the same memory, layer by layer: clone
            keys[layer, :, :, target] = self.keys[layer, :, :, source].clone()
            values[layer, :, :, target] = self.values[layer, :, :, source].clone()
        self.keys = keys
        self.values = values
        self.starts.add_(column - self.column).clamp_(min=0)
        self.column = column

    def _seen(self, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """The beginning of each layer's memory as keys and values of this shape."""
        keys, values = self.memory[:, :, : math.prod(shape)]
        return keys.view(-1, *shape), values.view(-1, *shape)

    def windows(self, length: int, dtype: torch.dtype) -> list[Window]:
        """Each layer's window for the next `length` columns; its mask hides what is not between start and column."""
        written = self.here + torch.arange(length, device=self.starts.device)
        mask = None
        if self.column > 0:
            columns = torch.arange(self.keys.shape[3], device=self.starts.device)
            hidden = (columns < self.starts[:, None]) | (columns > self.here)  # (rows, columns)
            mask = torch.where(hidden[:, None, None], -torch.inf, 0.0).to(dtype)
        layers = range(len(self.keys))
        return [Window(self.keys[layer], self.values[layer], written, mask) for layer in layers]
