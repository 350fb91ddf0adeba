"""Process function of the verbs with a loss: returned outputs, and sums of metrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from areal.api import Batch, MicroBatchSpec, TokenOutputs
from areal.api.batch import Metric
from areal.api.microbatch import MicroBatchList
from areal.engine.loss_step import LossResult, LossStep, LossWeights, sum_results
from areal.utils.data import plan_batch


def micro_batches(n: int) -> MicroBatchList:
    batch = [{"input_ids": torch.arange(4)} for _ in range(n)]
    return plan_batch(batch, MicroBatchSpec(n_mbs=n)).build(n_mbs=n, device=torch.device("cpu"))


def test_mean_over_nothing_in_one_micro_batch_is_skipped() -> None:
    nothing, empty = torch.zeros(()), torch.zeros(0)
    means = [Metric(empty.mean(), nothing), Metric(torch.tensor(2.0), 3.0)]
    metrics = [{"x": mean, "y": Metric(empty.mean(), nothing), "sum": Metric(1.0, 0.0, "sum")} for mean in means]
    sums = sum_results(micro_batches(2), [LossResult({}, each) for each in metrics])
    assert sums.reduced_metrics() == {"sum": 2.0, "x": 2.0, "y": 0.0}


def test_mean_that_is_not_finite_is_reported() -> None:
    sums = sum_results(micro_batches(1), [LossResult({}, {"x": Metric(torch.tensor(math.nan), 1.0)})])
    assert math.isnan(sums.reduced_metrics()["x"])


@pytest.mark.parametrize("in_place", [False, True])
def test_outputs_are_returned_as_before_the_loss(in_place: bool) -> None:
    def loss(out: TokenOutputs, batch: Batch) -> Tensor:
        return (out.logprobs.mul_(2) if in_place else out.logprobs * 2).sum()

    logprobs = torch.ones(4, requires_grad=True) * 1.0
    step = LossStep(loss, LossWeights(True, {0: {"loss": 1.0}}, {"loss": 1.0}), {"loss": 1.0}, 1.0, ("logprobs",))
    value, result = step(TokenOutputs(logprobs=logprobs), micro_batches(1).mbs[0])
    assert value is not None
    assert value.item() == 8.0
    assert result.outputs["logprobs"].tolist() == [1.0] * 4
    assert not result.outputs["logprobs"].requires_grad
