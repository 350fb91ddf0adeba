"""Log-probs, entropy and the most likely tokens from hidden states, without materializing all logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import IGNORE_INDEX, TopKOutput
from areal.utils.functional.chunked_head import ChunkedHead
from areal.utils.functional.head_spec import HeadSpec, head_dtypes
from areal.utils.functional.head_update import HeadUpdate, check_update
from areal.utils.functional.product import WideLinear
from areal.utils.functional.vocab_parallel import GatheredVocab, ReplicatedInput, VocabShard

# Memory for the logits of one chunk. On a CPU they should stay in its caches. On a GPU chunks should be large, because each
# reads the weight, and reads and writes the gradient of the weight.
_CPU_CHUNK_BYTES = 8 * 2**20
_CHUNK_BYTES = 512 * 2**20
# Memory for logits that are kept for the backward.
_CPU_KEEP_BYTES = 256 * 2**20
_KEEP_BYTES = 2**30
_MIN_CHUNK = 128  # tokens; with fewer, reading the weight takes longer than multiplying by it


@dataclass(frozen=True)
class HeadOutputs:
    """Requested outputs of a head, in float32 (float64 if the hidden states or the weight are). Others are ``None``.

    Attributes:
        logprobs: ``[T]`` or ``[T, K]``, the shape of the targets. Exactly 0.0 at positions without a target.
        entropy: ``[T]``, in nats, after temperature.
        topk: log-probs ``[T, k]`` after temperature, in descending order, and their token ids.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    topk: TopKOutput | None = None


def head_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    bias: Tensor | None = None,
    update: HeadUpdate | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    topk: int | None = None,
    fp32: bool = False,
    scale_logits: bool = False,
    chunk_size: int | None = None,
    keep_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> HeadOutputs:
    """Compute log-probs, entropy and top-k of ``softmax(z)`` for the logits ``z`` of :func:`logits`, chunk by chunk.

    Differentiable once, in ``hidden``, ``weight``, ``bias`` and ``update``; the gradient of top-k treats the ids as constants. Peak memory
    is ``keep_bytes``, a few times ``chunk_size * V`` elements and the gradients, independent of ``T``.

    With ``group``, the head is sharded: ``weight``, ``bias`` and ``update.up`` are this rank's rows, and all other arguments
    must be equal on all ranks. Outputs are equal on all ranks, and so must be their gradients. The gradients of ``hidden`` and
    ``update.down`` are already summed over the group. Three collectives forward (five with top-k) and one backward (two with
    an update), for any number of chunks.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``, or this rank's rows ``[V_r, H]``.
        targets: int64 ``[T]`` or ``[T, K]``. ``IGNORE_INDEX`` gives exactly 0.0 and no gradient. ``None``: no log-probs.
        bias: ``[V]`` or ``[V_r]``.
        update: low-rank update of the weight, which is not changed itself.
        temperature: positive number, or ``[T]``. Receives no gradient.
        logit_scale, softcap: factor and bound of the model on its logits.
        entropy: whether to return the entropy.
        topk: number of most likely tokens to return, at most the size of the vocabulary.
        fp32: whether to keep gradients of logits in float32 where 16-bit operands are multiplied (on CUDA). Logits are
            never rounded.
        scale_logits: divide logits by the temperature, as samplers do. Otherwise a product's operands are scaled where that is faster.
        chunk_size: number of tokens whose logits exist at a time. Defaults to 512 MiB of logits (8 MiB on a CPU).
        keep_bytes: memory for logits that are kept for the backward. Defaults to 1 GiB (256 MiB on a CPU).
        group: ranks that the vocabulary is sharded over, in consecutive blocks.

    Raises:
        ValueError: shapes, dtypes or options are invalid, or a target is outside the vocabulary. On an accelerator the
            log-prob of such a target is NaN instead, because a check would wait for the device.
    """
    _check_inputs(hidden, weight, bias, update, temperature, softcap)
    _check_options(hidden, targets, topk, chunk_size, keep_bytes)
    if targets is None and not entropy and not topk:
        return HeadOutputs()
    shard = VocabShard.of(weight, group)
    _check_topk(topk, shard)

    # Leave out positions that need no logits.
    n_tokens = hidden.shape[0]
    rows = None if targets is None else _rows_to_compute(targets, shard, all_rows=bool(entropy or topk))
    if targets is not None and rows is not None:
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
        temperature = temperature.index_select(0, rows) if isinstance(temperature, Tensor) else temperature

    # The head itself, with targets [T, K].
    spec = HeadSpec(
        temperature=temperature.detach() if isinstance(temperature, Tensor) else float(temperature),
        logit_scale=float(logit_scale),
        softcap=softcap,
        fp32=fp32,
        scale_logits=scale_logits,
        entropy=entropy,
        topk=topk or 0,
        chunk_size=chunk_size or _default_chunk(hidden, weight),
        keep_bytes=_bytes_to_keep((hidden, weight, bias, *(update or ())), keep_bytes),
        shard=shard,
    )
    columns = targets.unsqueeze(1) if targets is not None and targets.ndim == 1 else targets
    with _no_autocast(hidden):  # off in backward, too, which must compute the same logits
        results = spec.dtypes(hidden, weight).results
        low, up = (None, None) if update is None else (update.project(hidden, results), update.up)
        logprobs, entropies, best, best_ids = ChunkedHead.apply(hidden, weight, bias, low, up, columns, spec)

    # Back to the shape of the targets.
    if logprobs is not None and targets is not None:
        logprobs = _placed(logprobs.view(targets.shape), rows, n_tokens)
    return HeadOutputs(logprobs, entropies, TopKOutput(best, best_ids) if topk else None)


def _placed(x: Tensor, rows: Tensor | None, n_tokens: int) -> Tensor:
    """Return values of some rows among those of all tokens, with 0.0 at the others."""
    return x if rows is None else x.new_zeros(n_tokens, *x.shape[1:]).index_copy(0, rows, x)


def logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    update: HeadUpdate | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    fp32: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return all logits ``[T, V]``, in float32 (float64 if an input is). Differentiable. Materializes the full tensor.

    ``z = logit_scale * (hidden @ weight.T + bias)``, with the update added to the weight, then ``softcap * tanh(z / softcap)``
    if the model has a softcap, then division by the temperature. For the arguments, and for gradients with a ``group``, see
    :func:`head_outputs`. The logits of all ranks are gathered; the backward keeps the gradient of this rank's columns.

    Raises:
        ValueError: shapes or options are invalid.
    """
    _check_inputs(hidden, weight, bias, update, temperature, softcap)
    shard = VocabShard.of(weight, group)
    _, results, stats = head_dtypes(hidden, weight, fp32=fp32)
    with _no_autocast(hidden):
        low = None if update is None else update.project(hidden, results)
        # Sum the gradient of the hidden states over ranks: each computes the columns of its shard only.
        if shard.group is not None:
            hidden = ReplicatedInput.apply(hidden, shard)
            low = None if low is None else ReplicatedInput.apply(low, shard)
        z = WideLinear.apply(hidden, weight, bias, stats, results)
        if update is not None and low is not None:
            z = z + WideLinear.apply(low, update.up.to(results), None, stats, results)
    if logit_scale != 1.0:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        z = z / temperature.detach().to(stats).unsqueeze(1)
    elif temperature != 1.0:
        z = z / temperature
    return z if shard.group is None else GatheredVocab.apply(z, shard)


def _no_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast. Does nothing on devices that do not support autocast (meta)."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _default_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of tokens of a chunk: within the device's memory bound, at least ``_MIN_CHUNK``, evenly divided."""
    allowed = _CPU_CHUNK_BYTES if hidden.device.type == "cpu" else _CHUNK_BYTES
    width = 8 if torch.float64 in (hidden.dtype, weight.dtype) else 4
    most = max(_MIN_CHUNK, allowed // (width * max(weight.shape[0], 1)))
    # Chunks of equal size, instead of full ones and a small rest.
    n_chunks = max(1, -(-hidden.shape[0] // most))
    return max(1, -(-hidden.shape[0] // n_chunks))


def _bytes_to_keep(inputs: Sequence[Any], keep_bytes: int | None) -> int:
    """Return the memory for kept logits: 0 if there will be no backward.

    Args:
        inputs: hidden states, and everything else that may require a gradient.
    """
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return 0
    return default_keep_bytes(inputs[0].device) if keep_bytes is None else keep_bytes


def default_keep_bytes(device: torch.device) -> int:
    """Return the memory for logits that are kept for the backward, by default."""
    return _CPU_KEEP_BYTES if device.type == "cpu" else _KEEP_BYTES


def _rows_to_compute(targets: Tensor, shard: VocabShard, *, all_rows: bool) -> Tensor | None:
    """Check targets, and return the positions to compute, or ``None`` for all positions.

    Both happen on a CPU only. On an accelerator, they would wait for the device.
    """
    if targets.device.type != "cpu":
        return None
    _check_ids(targets, int(shard.total))
    return None if all_rows else _rows_with_targets(targets)


def _rows_with_targets(targets: Tensor) -> Tensor | None:
    """Return the positions with at least one target, or ``None`` if all positions have one."""
    has_target = targets != IGNORE_INDEX
    has_target = has_target.any(1) if targets.ndim == 2 else has_target
    return None if bool(has_target.all()) else has_target.nonzero().squeeze(1)


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    update: HeadUpdate | None,
    temperature: float | Tensor,
    softcap: float | None,
) -> None:
    # Shapes of the head.
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H] and [V, H]: flatten batch and "
            "sequence dimensions, and pass the head's weight as torch.nn.Linear keeps it"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight has no rows: every rank of a vocab-parallel head must hold at least one")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must have one entry per row of weight {list(weight.shape)}")
    if update is not None:
        check_update(update, weight)
    # Values of a temperature tensor are not checked here, which would wait for the device.
    if isinstance(temperature, Tensor):
        if temperature.shape != hidden.shape[:1]:
            raise ValueError(
                f"temperature {list(temperature.shape)} must be a number or one per token, [{hidden.shape[0]}]: "
                "expand a per-sequence temperature over its tokens"
            )
    elif not temperature > 0:
        raise ValueError(f"temperature = {temperature}: it must be positive (for greedy decoding use topk=1)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap}: it must be positive, or None for no softcap")


def _check_options(
    hidden: Tensor,
    targets: Tensor | None,
    topk: int | None,
    chunk_size: int | None,
    keep_bytes: int | None,
) -> None:
    if targets is not None and (targets.dtype != torch.int64 or targets.ndim not in (1, 2)):
        raise ValueError(f"targets are {targets.dtype} {list(targets.shape)}: pass int64 [T] or [T, K]")
    if targets is not None and targets.shape[0] != hidden.shape[0]:
        raise ValueError(f"targets {list(targets.shape)} must have one row per token of hidden {list(hidden.shape)}")
    if topk is not None and topk < 1:
        raise ValueError(f"topk = {topk}: ask for at least 1")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: pass at least 1, or None to choose")
    if keep_bytes is not None and keep_bytes < 0:
        raise ValueError(f"keep_bytes = {keep_bytes}: pass 0 to keep no logits, or None to choose")


def _check_topk(topk: int | None, shard: VocabShard) -> None:
    # On an accelerator, reading the size of a sharded vocabulary would wait for the device. Engines check it before a call.
    if topk is None or (isinstance(shard.total, Tensor) and shard.total.device.type != "cpu"):
        return
    if topk > int(shard.total):
        raise ValueError(f"topk = {topk}: ask for at most the size of the vocabulary, {int(shard.total)}")


def _check_ids(targets: Tensor, vocab_size: int) -> None:
    bad = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= vocab_size))
    if bool(bad.any()):
        raise ValueError(
            f"targets hold the id {int(targets[bad][0])}, outside the vocabulary of {vocab_size}: mark positions "
            f"without a target by {IGNORE_INDEX}, and check that tokenizer and model belong together"
        )
