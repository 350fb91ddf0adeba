"""Checks of a finished run; a failed check sets its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from history import History
from plain import model_from_directory, token_logprobs
from torch import Tensor
from transformers import PreTrainedModel

from areal import TrainEngine

ROUNDING = 1.5
"""Ratio of the distance between two independently rounded runs to their distance from the exact result: the square root of 2 plus a margin."""

FLOAT32_ERROR = 1e-4
"""Mean difference of log-probs, in nats, between float32 computations in another order."""


def reload_error(
    engine: TrainEngine, checkpoint: Path, samples: Sequence[dict[str, Tensor]], streamed: PreTrainedModel
) -> dict[str, float]:
    """Load a checkpoint with plain transformers and compare its log-probs with the engine's, in the engine's dtype.

    They may differ by the rounding of that dtype, which is measured as the difference of plain transformers in that dtype and in
    float32. The mean difference may be :data:`ROUNDING` times that, plus :data:`FLOAT32_ERROR`. In float32 only the latter remains.

    Args:
        engine: engine that wrote the checkpoint.
        checkpoint: directory.
        samples: samples to score, at least one per data-parallel rank.
        streamed: plain model with the weights that the engine streamed, in its compute dtype.

    Returns:
        ``mean`` and ``max``: difference in nats over all tokens. ``rounding``: mean difference due to the dtype. ``bound``: limit of
        ``mean``. ``weights``: number of reloaded tensors that are not bitwise equal to the streamed ones. Equal on all ranks.
    """
    mine = samples[engine.dp_rank :: engine.dp_size]
    reloaded = model_from_directory(checkpoint, streamed.dtype, streamed.device)
    expected = streamed.state_dict()
    weights = sum(not torch.equal(tensor, expected[name]) for name, tensor in reloaded.state_dict().items())
    plain = torch.cat(token_logprobs(reloaded, mine))
    exact = torch.cat(token_logprobs(model_from_directory(checkpoint, torch.float32, streamed.device), mine))
    error = (torch.cat([row.cpu().float() for row in engine.forward_batch(mine)]) - plain).abs()
    sums = torch.tensor(
        [error.sum(), (plain - exact).abs().sum(), len(error)], dtype=torch.float64, device=streamed.device
    )
    tops = torch.tensor([error.max(), weights], dtype=torch.float64, device=streamed.device)
    dist.all_reduce(sums)
    dist.all_reduce(tops, op=dist.ReduceOp.MAX)
    mean, rounding = (sums[:2] / sums[2]).tolist()
    bound = ROUNDING * rounding + FLOAT32_ERROR
    return {"mean": mean, "max": tops[0].item(), "rounding": rounding, "bound": bound, "weights": tops[1].item()}


def failures(history: History, min_loss_fall: float, accuracy_must_rise: bool) -> list[str]:
    """Return one sentence per failed check, with the measured values."""
    failed = []
    loss, right = list(history.held_out_loss.values()), list(history.accuracy.values())
    error = history.reload_error
    fall = 1 - loss[-1] / loss[0]
    if not fall >= min_loss_fall:
        failed.append(
            f"held-out loss went from {loss[0]:.4f} to {loss[-1]:.4f}: it fell by {fall:.1%}, "
            f"and {min_loss_fall:.0%} was asked for"
        )
    if accuracy_must_rise and not right[-1] > right[0]:
        failed.append(f"accuracy on held-out problems went from {right[0]:.3f} to {right[-1]:.3f}: it did not rise")
    if not error["mean"] <= error["bound"]:
        failed.append(
            f"log-probs of the engine and of its reloaded checkpoint differ by {error['mean']:.2e} nats on average, "
            f"where rounding accounts for {error['bound']:.2e}"
        )
    if error["weights"]:
        failed.append(f"{error['weights']:.0f} tensors of the reloaded checkpoint are not, bit for bit, the engine's")
    return failed


def largest_difference(ours: History, theirs: History) -> float:
    """Return the largest relative difference between the training losses of two runs, over the steps that both took."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours.train_loss, theirs.train_loss, strict=False))
