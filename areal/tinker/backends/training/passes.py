"""Forward and backward passes of requests. Requests of several models share a call of the engine where that is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.api import ParallelDims
from areal.dispatch import WorkerGroup
from areal.engine.model.hub import read_config
from areal.tinker.backends.losses.by_model import LossByModel
from areal.tinker.backends.losses.loss_interface import ProtocolLoss
from areal.tinker.backends.prepared import PassResult, PreparedBatch
from areal.tinker.backends.training.rank_work import unit_weight
from areal.tinker.backends.training.samples import target_arrays
from areal.utils.data import ADAPTER

FEWEST_TOKENS = 4
"""Products of fewer rows round in another way than those of many."""

SHORT = 200
"""Tokens of a request up to which a call of eight models was measured to be at least 1.5 times as fast as eight calls."""

_RUNS = ("fsdp", "megatron")
"""Engines that compute each adapter of a call as in a call with it alone."""

_MULTIPLE = 32
"""Widths that are multiples of this have products whose rows do not depend on the number of rows."""


@dataclass(frozen=True)
class Pass:
    """A request that is ready for the engine.

    Attributes:
        batch: the request.
        adapter: name of the model's adapter in the engine.
        loss: its loss.
        samples: its data, as the engine's samples.
    """

    batch: PreparedBatch
    adapter: str
    loss: ProtocolLoss
    samples: Sequence[dict[str, Tensor]]

    @property
    def form(self) -> tuple[Any, ...]:
        """Keys of a sample, and shape of its targets at one position: equal in all samples of a call."""
        first = self.samples[0]
        return (sorted(first), tuple(first["target_ids"].shape[1:]))


def divide_into_calls(passes: Sequence[Pass], most_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of the requests of each call: requests of different models and equal form, if they are short.

    Args:
        passes: requests, of which those of one model run in this order.
        most_tokens: most tokens of a request that shares a call.
    """
    calls: list[list[int]] = []
    for index, each in enumerate(passes):
        # A call that a later request joins must not come before an earlier request of the same model.
        first = max((k for k, call in enumerate(calls) if each.adapter in _adapters(passes, call)), default=-1) + 1
        fitting = [call for call in calls[first:] if _fit(passes[call[0]], each, most_tokens)]
        if fitting:
            fitting[0].append(index)
        else:
            calls.append([index])
    yield from calls


def _adapters(passes: Sequence[Pass], call: Sequence[int]) -> set[str]:
    return {passes[index].adapter for index in call}


def _fit(one: Pass, other: Pass, most_tokens: int) -> bool:
    """Return whether two requests of different models may share a call."""
    return one.form == other.form and all(FEWEST_TOKENS <= each.batch.tokens <= most_tokens for each in (one, other))


def run_passes(group: WorkerGroup, names: Sequence[str], passes: Sequence[Pass], *, train: bool) -> list[PassResult]:
    """Run the requests of one call. Nothing is added to any pending gradient if it raises.

    Args:
        group: the engine.
        names: names of all adapters, in the engine's order.
        passes: requests of different models.
        train: compute gradients.
    """
    # 1. One batch, whose samples name their adapters.
    indices = [names.index(each.adapter) for each in passes]
    samples = [
        {**sample, ADAPTER: torch.tensor(index)}
        for index, each in zip(indices, passes, strict=True)
        for sample in each.samples
    ]
    loss = LossByModel({index: each.loss for index, each in zip(indices, passes, strict=True)})

    # 2. One pass of the engine.
    if train:
        step = group.forward_backward(samples, loss, unit_weight, normalization="sum", returns=("logprobs",))
    else:
        step = group.eval_batch(samples, loss, unit_weight, returns=("logprobs",))

    # 3. The results of each request.
    results, logprobs = [], iter(step.outputs["logprobs"])
    for index, each in zip(indices, passes, strict=True):
        own = [next(logprobs) for _ in each.samples]
        results.append(PassResult(target_arrays(own, each.batch.data), LossByModel.metrics_of(index, step.metrics)))
    return results


def rounds_alike(model: str, dtype: str, dims: ParallelDims, threads: int) -> bool:
    """Return whether requests that share a call have the bits of separate calls, as far as that was measured.

    That is so on one CPU process with one thread, in float32, for a model without experts whose widths are multiples of 32. On JAX, several
    adapters are another program than one.
    """
    config = read_config(model).get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    widths = (
        config.hidden_size,
        getattr(config, "intermediate_size", None) or 1,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )
    experts = any("expert" in name and value for name, value in config.to_dict().items())
    plain = dims.world_size == threads == 1 and dtype == "float32" and not torch.cuda.is_available()
    return plain and dims.backend in _RUNS and not experts and all(width % _MULTIPLE == 0 for width in widths)
