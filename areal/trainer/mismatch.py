"""How far the log-probs of trainer and rollout are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal.api import TrainEngine
from areal.trainer.losses import kl_k1, kl_k3
from areal.utils.data.sequences import ROUTED_EXPERTS


def mismatch(
    engine: TrainEngine, samples: Sequence[Mapping[str, Tensor]], *, unreplayed: int | None = None
) -> dict[str, float]:
    """Return the difference of ``old_logprobs`` (trainer) and ``rollout_logprobs`` over the trained tokens of the global batch. Collective.

    Args:
        engine: the policy.
        samples: scored samples of this data-parallel rank.
        unreplayed: number of the samples with ``routed_experts`` that are also computed with the experts of the trainer's own routers, in
            one more forward; ``None`` for all.

    Returns:
        ``rollout/logprob_error``, the mean absolute difference in nats, and ``rollout/logprob_k3``, an estimate of KL(rollout || trainer)
        (k3; Schulman, "Approximating KL Divergence", 2020). Empty if no rank has a trained token. If samples of any rank have experts to
        replay, also both numbers of the ``unreplayed`` samples, with names that end with ``_without_replay``.
    """
    chosen = [sample for sample in samples if ROUTED_EXPERTS in sample][:unreplayed]
    *sums, replayed = engine.global_sum(torch.stack([*_sums(samples), torch.tensor(len(chosen)).double()])).tolist()
    scalars = _means(sums)
    if not replayed:
        return scalars
    plain = [{key: value for key, value in sample.items() if key != ROUTED_EXPERTS} for sample in chosen]
    scored = zip(plain, engine.forward_batch(plain), strict=True)
    without = _sums([{**sample, "old_logprobs": logprobs} for sample, logprobs in scored])
    means = _means(engine.global_sum(without).tolist())
    return scalars | {f"{name}_without_replay": value for name, value in means.items()}


def _sums(samples: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return absolute differences, the estimate of KL, and tokens of one rank, each summed, in float64 on the CPU."""
    sums = torch.zeros(3, dtype=torch.float64)
    for sample in samples:
        mask, old, rollout = (sample[key].double().cpu() for key in ("loss_mask", "old_logprobs", "rollout_logprobs"))
        error, k3 = kl_k1(old, rollout, mask).abs(), kl_k3(rollout, old, mask)
        sums += torch.stack([error.sum(), k3.sum(), mask.count_nonzero()])
    return sums


def _means(sums: Sequence[float]) -> dict[str, float]:
    *totals, tokens = sums
    names = ("rollout/logprob_error", "rollout/logprob_k3")
    return {name: total / tokens for name, total in zip(names, totals, strict=True)} if tokens else {}
