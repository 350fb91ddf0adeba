"""Experts of tokens on the test servers: recorded, changed on request, and encoded as vLLM does."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel


@contextlib.contextmanager
def routing(model: PreTrainedModel, *, shifted: bool) -> Iterator[list[Tensor]]:
    """Record the experts ``[T, K]`` of each layer in the next forward of one sequence.

    Args:
        model: any model; without experts, nothing is recorded.
        shifted: send each token to the experts after those that its router chose, as a server with other kernels sometimes does.
    """
    chosen: list[Tensor] = []

    def hook(router: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = out
        if shifted:
            experts = (experts + 1) % logits.shape[-1]
            weights = logits.float().softmax(-1).gather(-1, experts)
            weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
        chosen.append(experts)
        return logits, weights, experts

    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    with contextlib.ExitStack() as hooks:
        for router in routers:
            hooks.callback(router.register_forward_hook(hook).remove)
        yield chosen


def npy(experts: Tensor) -> str:
    """Return base64 of a ``.npy`` file."""
    file = io.BytesIO()
    np.save(file, experts.to(torch.uint8).numpy())
    return base64.b64encode(file.getvalue()).decode()
