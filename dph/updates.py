"""What stands around the loss in an optimizer step: micro-batches, several processes, memory that runs out, AdamW.

An update's rows are cut into micro-batches by tokens. Each gives its part of E6 and its gradient; the parts sum to the
update's whole, since every term is divided by a denominator that counts all rows of the update (E4). Where a GPU's
memory is full, the whole update is tried once more in micro-batches of half the tokens.

Several processes deal the micro-batches out and sum their gradients (dph/distributed.py); each updates what it holds of
the weights. One process does all of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from dph import distributed
from dph.config import Config
from dph.errors import UserError
from dph.losses import denominator
from dph.metrics import Meter
from dph.model import Decoder
from dph.optimizer import make_adamw
from dph.rollouts import Batch, Rollout, collate, group_by_tokens

Kind = Literal["rollouts", "stored", "pef_rollouts"]


@dataclass(frozen=True)
class Update:
    """The rows of one optimizer step that have a gradient, by the term of the objective that they belong to."""

    rollouts: list[Rollout]  # explored: L_exp (E4)
    advantages: Tensor  # (rollouts,)
    stored: list[Rollout]  # stored answers of D_pef: L_pef (E5)
    pef_rollouts: list[Rollout]  # new answers to prompts of D_pef: L_pef by its definition (E8)
    denominators: dict[Kind, float]  # what each term is divided by; rows without a gradient count, too

    def rows(self, kind: Kind) -> list[Rollout]:
        """The rows of one kind."""
        return {"rollouts": self.rollouts, "stored": self.stored, "pef_rollouts": self.pef_rollouts}[kind]

    @property
    def tokens(self) -> int:
        """All tokens that the model reads for it, prompts included."""
        return sum(len(rollout) for rollout in (*self.rollouts, *self.stored, *self.pef_rollouts))


def make_update(
    config: Config,
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    stored: Sequence[Rollout] = (),
    pef_rollouts: Sequence[Rollout] = (),
) -> Update:
    """An update of all these rows. A rollout whose advantage is 0 has no gradient in E4: it only counts.

    Args:
        advantages: (rollouts,).
    """
    loss = config.loss
    length = loss.aggregation_length or config.sampling.max_new_tokens
    kinds: dict[Kind, Sequence[Rollout]] = {"rollouts": rollouts, "stored": stored, "pef_rollouts": pef_rollouts}
    denominators: dict[Kind, float] = {}
    for kind, rows in kinds.items():
        lengths = torch.tensor([len(rollout.tokens) for rollout in rows])
        denominators[kind] = denominator(lengths, loss.aggregation, length)
    trained = list(range(len(rollouts)))
    if not loss.penalises_rollouts and not loss.entropy:  # both pull on every row
        trained = [row for row, advantage in enumerate(advantages.tolist()) if advantage != 0]
    explored = [rollouts[row] for row in trained]
    return Update(explored, advantages[trained], list(stored), list(pef_rollouts), denominators)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one backward pass: of one kind or of several, None for the others.

    A batch has B rows (answers) and at most T response tokens; the denominators are the whole update's.
    """

    denominators: dict[Kind, float]
    rollouts: Batch | None = None
    advantages: Tensor | None = None  # (B,) of `rollouts`
    stored: Batch | None = None
    pef_rollouts: Batch | None = None


class Attempt(AbstractContextManager[Iterator[MicroBatch]]):
    """One try at an update's gradient: `with attempt as micro_batches`, with one backward pass for each.

    The micro-batches are this process's share. At the end of the block the gradients are summed over the processes.
    Running out of memory within it is no error: it sets `out_of_memory`, on all processes, and there are no gradients.
    """

    def __init__(self, model: Decoder, update: Update, budget: int) -> None:
        self.model, self.update = model, update
        self.out_of_memory = False
        self.groups: list[tuple[Kind, list[int]]] = []  # of each micro-batch: its kind, and its rows among that kind's
        kinds: tuple[Kind, ...] = ("rollouts", "stored", "pef_rollouts")
        for kind in kinds:
            groups = group_by_tokens(update.rows(kind), budget)
            self.groups += [(kind, group) for group in distributed.deal_share(groups, partial(self._cost, kind))]

    def _cost(self, kind: Kind, group: list[int]) -> float:
        return sum(len(self.update.rows(kind)[row]) for row in group)

    def __enter__(self) -> Iterator[MicroBatch]:
        self.weights = distributed.whole_weights(self.model)
        self.weights.__enter__()
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[MicroBatch]:
        """Made one after another, so that only one is in memory."""
        update = self.update
        device = next(self.model.parameters()).device
        advantages = update.advantages.to(device)
        for kind, group in self.groups:
            batch = collate([update.rows(kind)[row] for row in group], device)
            if kind == "rollouts":
                yield MicroBatch(update.denominators, rollouts=batch, advantages=advantages[group])
            elif kind == "stored":
                yield MicroBatch(update.denominators, stored=batch)
            else:
                yield MicroBatch(update.denominators, pef_rollouts=batch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        full = isinstance(error, torch.OutOfMemoryError)
        if error is not None and not full:
            return False
        self.out_of_memory = any(distributed.gather([full]))
        if self.out_of_memory:
            distributed.forget_gradients(self.model)
        else:
            distributed.sum_gradients(self.model, self._empty_pass)
        self.weights.__exit__(None, None, None)
        return full

    def _empty_pass(self) -> Tensor:
        """A loss of one token that goes through all weights and pulls on none."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.head.device)
        logits = self.model.logits(self.model(token))  # (1, 1, V)
        return 0 * logits.sum()


class Optimizer:
    """AdamW on the gradients that the attempts leave."""

    def __init__(self, model: Decoder, config: Config) -> None:
        self.model, self.config = model, config
        if config.train.shard == "full":
            distributed.shard(model, model.model.layers)
        self.adamw = make_adamw(model.parameters(), config.optim)

    def attempts(self, update: Update) -> Iterator[Attempt]:
        """One try at an update; after one that ran out of memory on any process, another in half the tokens.

        Raises: UserError where that is too much, too.
        """
        whole = self.config.train.microbatch_tokens
        for budget in (whole, whole // 2):
            attempt = Attempt(self.model, update, budget)
            yield attempt
            if not attempt.out_of_memory:
                return
            torch.cuda.empty_cache()
        raise UserError(f"out of memory in micro-batches of {whole // 2} tokens; lower train.microbatch_tokens")

    def step(self, loss: Tensor, updates: int) -> dict[str, float] | None:
        """Clips, warms up and steps; returns `grad_norm` and `lr`.

        A loss or gradient that is not finite leaves weights and moments as they are: None.

        Args:
            loss: this process's part of the update's.
            updates: how many there were before.
        """
        optim = self.config.optim
        total_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.grad_clip or float("inf"))
        norm = float(distributed.whole(total_norm))
        finite = norm < float("inf") and bool(loss.isfinite())  # False for NaN, too
        stepped = all(distributed.gather([finite]))
        if stepped:
            rate = optim.lr * min(1.0, (updates + 1) / max(1, optim.warmup_steps))
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        self.model.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": rate} if stepped else None


def gather_metrics(meter: Meter) -> Meter:
    """What all processes have counted in a step, on each of them."""
    whole, *others = distributed.gather([meter.read()])
    for other in others:
        whole.merge(other)
    return whole
