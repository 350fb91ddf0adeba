"""Functions of the backend that run on the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.api import Batch, TokenOutputs, TrainEngine
from areal.engine.batch_rules import rules_of


def unit_weight(batch: Batch) -> Tensor:
    """Return the loss weight of a micro-batch of a request: 1, so that the loss of data without weight is computed, too."""
    return batch["input_ids"].new_ones((), dtype=torch.float64)


def no_weight(batch: Batch) -> Tensor:
    """Return the loss weight 0. The gradient of such a micro-batch is exactly 0."""
    return batch["input_ids"].new_zeros((), dtype=torch.float64)


def no_loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Loss function of a batch without weight, which is never called."""
    raise RuntimeError("a batch without weight has no loss")


def vocab_size(engine: TrainEngine, _: Any) -> int:
    """Return the number of token ids.

    Raises:
        ValueError: the engine does not derive from the template of engines.
    """
    rules = rules_of(engine)
    if rules is None:
        raise ValueError("the engine has no batch_rules, which the backend needs: derive it from BaseTrainEngine")
    return rules.vocab_size


def threads(engine: TrainEngine, _: Any) -> int:
    """Return the number of threads of a product on the CPU."""
    return torch.get_num_threads()
