"""Batches without samples: fillers that have the keys of another rank, and results without rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import MicroBatch, MicroBatchSpec
from areal.utils.data import plan_batch
from areal.utils.data.padding import NO_SAMPLES

CPU = torch.device("cpu")
PEER = MicroBatchSpec(payloads=("image",))
NOTHING: dict[str, Any] = {
    "list": [],
    "padded": {
        "input_ids": torch.zeros(0, 5, dtype=torch.int64),
        "attention_mask": torch.zeros(0, 5),
        "reward": torch.zeros(0),
    },
    "no columns": {"input_ids": torch.zeros(0, 0, dtype=torch.int64)},
}
SPECS = {
    "plain": MicroBatchSpec(),
    "packed": MicroBatchSpec(max_tokens_per_mb=8, n_mbs=3, granularity=2, share_prefixes=True),
}


def samples_of(*lengths: int) -> list[dict[str, Tensor]]:
    """Return a list batch with every kind of key."""
    return [
        {
            "input_ids": torch.arange(n, dtype=torch.int32),
            "target_ids": torch.ones(n, 2, dtype=torch.int64),
            "loss_mask": torch.ones(n, dtype=torch.bool),
            "hidden": torch.ones(n, 2, 3, dtype=torch.bfloat16),
            "output_mask": torch.ones(n),
            "temperature": torch.tensor(0.5),
            "features": torch.ones(4, 1, dtype=torch.int16),
            "image": torch.ones(n, 6),
        }
        for n in lengths
    ]


def described(mb: MicroBatch) -> dict[str, Any]:
    """Return the dtype and trailing shape of every key of a micro-batch, and the values of a filler."""
    tensors = {key: x[0] if isinstance(x, list) else x for key, x in mb.data.items() if key != "meta"}
    return {key: (x.dtype, tuple(x.shape[1:]), x.tolist() if mb.filler else None) for key, x in tensors.items()}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", NOTHING)
def test_fillers_have_the_keys_of_a_peer(form: str, spec: str) -> None:
    plan = plan_batch(NOTHING[form], SPECS[spec], align=4, vocab_size=50)
    assert (plan.n_mbs, plan.n_tokens, plan.padded_length, plan.dropped) == (0, 0, 4, ())
    peer = plan_batch(samples_of(3, 4), PEER)
    assert plan.digest() == plan_batch(NOTHING[form], SPECS[spec]).digest() != peer.digest()
    mbs = plan.beside_idle_ranks(peer.keys).build(n_mbs=2, device=CPU)
    theirs = peer.beside_idle_ranks(NO_SAMPLES).build(n_mbs=2, device=CPU)
    assert (mbs.idle_ranks, theirs.idle_ranks) == (True, True)
    assert (mbs.real, mbs.n_tokens, [mb.filler for mb in mbs]) == ((), 0, [True, True])
    assert [theirs[0].filler, theirs[1].filler] == [False, True]
    assert described(mbs[0]) == described(mbs[1]) == described(theirs[1])
    assert {key: form[:2] for key, form in described(mbs[0]).items()} == {
        key: form[:2] for key, form in described(theirs[0]).items()
    }
    assert mbs[0].wanted is not None


@pytest.mark.parametrize("form", NOTHING)
def test_fillers_without_a_peer_have_the_least_keys(form: str) -> None:
    mbs = plan_batch(NOTHING[form], MicroBatchSpec()).build(n_mbs=1, device=CPU)
    assert mbs[0].data.keys() == {"input_ids", "target_ids", "cu_seqlens", "meta"}
    assert not mbs.idle_ranks


def test_restore_without_samples() -> None:
    like = {"a": torch.ones(7, 2, dtype=torch.float64), "b": [torch.ones(7, dtype=torch.int64)]}
    lists, padded = (
        plan_batch(NOTHING[form], MicroBatchSpec()).build(n_mbs=1, device=CPU) for form in ("list", "padded")
    )
    assert lists.restore([]) == []
    assert lists.restore([], like=like) == {"a": [], "b": [[]]}
    assert padded.restore([]).shape == (0, 5)
    restored = padded.restore([], like=like)
    assert (restored["a"].shape, restored["a"].dtype) == ((0, 5, 2), torch.float64)
    assert (restored["b"][0].shape, restored["b"][0].dtype) == ((0, 5), torch.int64)
    # Dropped samples are zeros, of the shape that another rank has.
    spec = MicroBatchSpec(max_tokens_per_mb=4, overlong="drop", payloads=("image",))
    dropped = plan_batch(samples_of(6, 5), spec).build(n_mbs=1, device=CPU)
    with pytest.raises(ValueError, match=r"every sample of this rank was dropped.*pass like="):
        dropped.restore([])
    assert [(x.shape, x.dtype, bool(x.any())) for x in dropped.restore([], like=like)["a"]] == [
        ((6, 2), torch.float64, False),
        ((5, 2), torch.float64, False),
    ]


def test_all_samples_are_dropped() -> None:
    samples = [{"input_ids": torch.arange(n), "temperature": torch.tensor(0.7)} for n in (20, 30)]
    plan = plan_batch(samples, MicroBatchSpec(max_tokens_per_mb=10, overlong="drop", share_prefixes=True))
    assert (plan.n_mbs, plan.dropped) == (0, (0, 1))
