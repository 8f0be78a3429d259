"""The objective: L = L_exp + eta L_pef (E6), and what each method puts into its two terms (E9).

    method              L_exp (E4)              L_pef
    grpo, dapo          rollouts, all prompts   none
    rkl                 rollouts, all prompts   a penalty on the same rollouts, against pi_ref online (E2)
    dph_f, dph_js, ...  rollouts, D_exp         f(u) on stored answers to D_pef (E5), or on stored distributions (E10)
    replay              rollouts, D_exp         the same with -log u: supervised
    dph_js_definition   rollouts, D_exp         half on stored answers to D_pef, half on new ones, pi_ref online (E8)

No method is known by its name: which of these it is follows from the [loss] section (dph/config.py). The terms
themselves are in dph/losses.py; they take tensors of B rows (answers) and T response positions.

Micro-batches: `Objective.loss` is called for each, and the results sum to the update's loss, since each term is divided
by the denominator of the whole update. A term whose rows are not in the micro-batch is 0.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dph import losses
from dph.answering import autocast
from dph.config import Config
from dph.metrics import Meter
from dph.model import Decoder
from dph.rollouts import Batch
from dph.scoring import Scores, token_logprobs
from dph.updates import MicroBatch


class Objective:
    """The loss of a config, for one model."""

    def __init__(self, model: Decoder, config: Config, on_policy: bool = False) -> None:
        """`on_policy`: every loss is of rollouts that the model wrote with the weights that it has now."""
        self.model, self.config, self.on_policy = model, config, on_policy
        self.settings = config.loss
        self.divergence = config.loss.make_divergence()
        # What is logged as `divergence` is one: -log u of the plain form, or one half of E8, is none.
        self.standard = replace(config.loss, divergence_form="standard").make_divergence()

    def loss(self, micro: MicroBatch, meter: Meter) -> Tensor:
        """L_exp + eta L_pef of a micro-batch (E6), a scalar with gradient; B answers of at most T tokens."""
        loss_exp = loss_pef = torch.zeros((), device=self.model.head.device)
        if (batch := micro.rollouts) is not None:
            scores = self._score(batch)  # log pi_theta, (B, T)
            batch = self._with_old(batch, scores)
            assert micro.advantages is not None, "rollouts without advantages"
            loss_exp = self._exploration(batch, scores, micro.advantages, micro.denominators["rollouts"], meter)
            if self.settings.penalises_rollouts:
                loss_pef = self._penalty(batch, scores, micro.denominators["rollouts"], meter)
        if (batch := micro.stored) is not None:
            loss_pef = loss_pef + self._rehearsal(batch, self._score(batch), micro.denominators["stored"], meter)
        if (batch := micro.pef_rollouts) is not None:
            scores = self._score(batch)
            batch = self._with_old(batch, scores)
            loss_pef = loss_pef + self._js_own_half(batch, scores, micro.denominators["pef_rollouts"])
        loss: Tensor = loss_exp + self.settings.eta * loss_pef  # E6
        return loss

    def _with_old(self, batch: Batch, scores: Scores) -> Batch:
        """The batch with log pi_old (B, T) as its log-probabilities: on policy that is log pi_theta, held fixed.

        Then rho = 1 and its gradient is that of log pi_theta. Else they are what the collector found.
        """
        return batch._replace(logprobs=scores.logprobs.detach()) if self.on_policy else batch

    def _exploration(
        self, batch: Batch, scores: Scores, advantages: Tensor, denominator: float, meter: Meter
    ) -> Tensor:
        """L_exp: the clipped loss of E4 on rollouts, less an entropy bonus where there is one."""
        settings, old_logprobs, mask = self.settings, batch.logprobs, batch.mask
        clip = settings.clip_low, settings.clip_high
        values = losses.clipped_loss(scores.logprobs, old_logprobs, advantages, mask, *clip, settings.dual_clip)
        low, high = losses.clipped_fractions(scores.logprobs, old_logprobs, advantages, mask, *clip)
        meter.add_tokens(mask, loss_exp=values, clip_low_fraction=low, clip_high_fraction=high)
        if scores.entropy is not None:
            values = values - settings.entropy * scores.entropy
        return losses.aggregate(values, mask, settings.aggregation, denominator)

    def _penalty(self, batch: Batch, scores: Scores, denominator: float, meter: Meter) -> Tensor:
        """What stands in L_pef's place for rkl: a penalty on the policy's own rollouts (E2)."""
        assert self.divergence is not None
        settings, ref_logprobs, mask = self.settings, batch.ref_logprobs, batch.mask
        found = losses.own_sample_divergence(scores.logprobs, ref_logprobs, mask, self.divergence)
        found = found * losses.importance_weights(scores.logprobs, batch.logprobs, mask, settings.ratio_cap)
        saturated = self.divergence.saturated(scores.logprobs - ref_logprobs)
        meter.add_tokens(mask, divergence=found, saturated_fraction=saturated)
        values = losses.penalty_loss(
            scores.logprobs,
            batch.logprobs,
            ref_logprobs,
            mask,
            self.divergence,
            settings.penalty_estimator,
            settings.ratio_cap,
        )
        return losses.aggregate(values, mask, settings.aggregation, denominator)

    def _rehearsal(self, batch: Batch, scores: Scores, denominator: float, meter: Meter) -> Tensor:
        """L_pef on stored answers, whose stored log-probabilities are pi_ref's: E5, E10, or the first half of E8."""
        assert self.divergence is not None
        assert self.standard is not None
        settings, ref_logprobs, mask = self.settings, batch.logprobs, batch.mask
        if scores.top is not None and scores.rest is not None:
            assert batch.top_logprobs is not None
            assert batch.top_rest is not None
            values = measured = losses.stored_distribution_loss(
                scores.top, scores.rest, batch.top_logprobs, batch.top_rest, mask, self.divergence
            )
            saturated = self.divergence.saturated(scores.top - batch.top_logprobs).any(-1)
            saturated = saturated | self.divergence.saturated(scores.rest - batch.top_rest)
        else:
            values = measured = losses.rehearsal_loss(scores.logprobs, ref_logprobs, mask, self.divergence)
            if settings.divergence_form == "plain":
                measured = losses.rehearsal_loss(scores.logprobs, ref_logprobs, mask, self.standard)
            saturated = self.divergence.saturated(scores.logprobs - ref_logprobs)
        if settings.answers_pef_prompts:
            values = losses.js_reference_half(scores.logprobs, ref_logprobs, mask)
        meter.add_tokens(mask, divergence=measured, saturated_fraction=saturated)
        return losses.aggregate(values, mask, settings.aggregation, denominator)

    def _js_own_half(self, batch: Batch, scores: Scores, denominator: float) -> Tensor:
        """The second half of E8, on new answers to prompts of D_pef."""
        values = losses.js_own_half(
            scores.logprobs, batch.logprobs, batch.ref_logprobs, batch.mask, self.settings.ratio_cap
        )
        return losses.aggregate(values, batch.mask, self.settings.aggregation, denominator)

    def _score(self, batch: Batch) -> Scores:
        """log pi_theta of the response tokens, (B, T)."""
        temperature, entropy = self.config.sampling.temperature, self.settings.entropy > 0
        with autocast(self.model, self.config.run.dtype):
            return token_logprobs(self.model, batch, temperature, entropy)
