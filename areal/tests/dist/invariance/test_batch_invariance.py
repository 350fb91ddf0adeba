"""Log-probs of the FSDP engine with ``batch_invariant``: the same bits in any packing, with any layout of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import MicroBatchSpec, ParallelDims
from areal.engine.registry import create_engine
from areal.tests.grid.models import VOCAB
from areal.tests.harness.tiny import config, family_dir, gradients_of, layout, local_batch, loss, started

LENGTHS = (2, 1, 15, 16, 33, 63, 65, 100)
"""Lengths on both sides of the borders of tiles of rows and blocks of keys."""

WIDE = {"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}


def sequences() -> list[dict[str, Any]]:
    """Return sequences of :data:`LENGTHS`, each with its own temperature. The last two begin with the same 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    tokens[-1][:40] = tokens[-2][:40]
    factors = torch.linspace(0.6, 1.4, len(tokens))
    return [{"input_ids": x, "temperature": t} for x, t in zip(tokens, factors, strict=True)]


def differing(backend: str, *, invariant: bool, **changes: Any) -> set[int]:
    """Return the lengths whose log-probs or entropies differ between ways to batch them."""
    batch, found = sequences(), dict[int, list[Tensor]]()
    section = {"fsdp": {"batch_invariant": invariant}}

    def compute(engine: Any, order: list[int]) -> None:
        out = engine.forward_batch([batch[i] for i in order], outputs=("logprobs", "entropy"))
        for i, logprobs, entropy in zip(order, out["logprobs"], out["entropy"], strict=True):
            found.setdefault(LENGTHS[i], []).append(torch.cat([logprobs, entropy]))

    everything = list(range(len(batch)))
    with started(
        backend, optimizer=None, mb_spec=MicroBatchSpec(max_tokens_per_mb=1000), **section, **changes
    ) as engine:
        compute(engine, everything)
        compute(engine, everything[::-1])
        for i in everything:
            compute(engine, [i])
    for spec in ({"max_tokens_per_mb": 110}, {"max_tokens_per_mb": 1000, "share_prefixes": True}):
        with started(backend, optimizer=None, mb_spec=MicroBatchSpec(**spec), **section, **changes) as engine:
            compute(engine, everything)
    return {n for n, results in found.items() if not all(torch.equal(results[0], x) for x in results)}


def family(name: str, dtype: str) -> Any:
    return layout("fsdp:d1", name, dtype)


@pytest.mark.parametrize(
    ("backend", "name", "dtype"),
    [
        family("qwen3", "float32"),
        family("qwen3", "bfloat16"),
        family("qwen3", "float64"),
        family("llama", "float32"),
        family("qwen2", "float32"),
        family("gemma3_text", "float32"),
        family("qwen3_moe", "float32"),
        family("deepseek_v3", "float32"),
    ],
)
def test_log_probs_have_the_same_bits_in_any_batch(backend: str, name: str, dtype: str) -> None:
    options: dict[str, Any] = WIDE if dtype == "float64" else {"dtype": dtype}
    path = family_dir(name)
    assert differing(backend, invariant=True, path=path, **options) == set()


@pytest.mark.world(1)
def test_without_the_option_the_same_batches_differ() -> None:
    assert differing("fsdp:d1", invariant=False)


@pytest.mark.parametrize("backend", [layout("fsdp:d2"), layout("fsdp:r2")])
def test_ranks_with_whole_sequences_have_the_same_bits(backend: str) -> None:
    batch = sequences()
    everything = MicroBatchSpec(max_tokens_per_mb=1000)
    with started(backend, optimizer=None, mb_spec=everything, fsdp={"batch_invariant": True}) as engine:
        mine = engine.forward_batch(local_batch(engine, batch))
        # The other ranks' sequences, which were computed in other company there.
        swapped = batch[1 - engine.dp_rank :: engine.dp_size]
        other = engine.forward_batch(swapped)
        gathered: list[Any] = [None] * engine.dp_size
        torch.distributed.all_gather_object(gathered, mine)
    assert all(torch.equal(a, b) for a, b in zip(gathered[1 - engine.dp_rank], other, strict=True))


@pytest.mark.world(1)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_gradients_are_those_of_plain_training(name: str, checkpointing: str) -> None:
    results = []
    for invariant in (True, False):
        options = {"activation_checkpointing": checkpointing, "fsdp": {"batch_invariant": invariant}}
        spec = MicroBatchSpec(max_tokens_per_mb=100)
        with started("fsdp:d1", path=family_dir(name), mb_spec=spec, **options) as engine:
            step = engine.forward_backward(training_batch(), loss)
            results.append((step.loss, gradients_of(engine)))
    (mine, gradients), (plain, expected) = results
    assert mine == pytest.approx(plain, rel=1e-5, abs=1e-6)
    for key in expected:
        torch.testing.assert_close(gradients[key], expected[key], rtol=1e-3, atol=1e-5)


def training_batch() -> list[dict[str, Tensor]]:
    return [
        {"input_ids": x["input_ids"], "loss_mask": torch.ones(n), "advantages": torch.linspace(-1, 1, n)}
        for x, n in zip(sequences()[:6], LENGTHS, strict=False)
    ]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"backend": "fsdp:c2"}, "c split"),
        ({"backend": "fsdp:t2"}, "t split"),
        ({"backend": "fsdp:p2v2"}, "pv split"),
        ({"fsdp": {"compile": True}}, r"fsdp\.compile"),
        ({"fsdp": {"layer_kernels": "liger"}}, r"fsdp\.layer_kernels"),
        ({"fsdp": {"attention": "rows"}}, r"fsdp\.attention"),
        ({"fp32_head": True}, "fp32_head"),
    ],
    ids=lambda x: x.replace("\\", "") if isinstance(x, str) else "",
)
def test_what_excludes_the_option_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    section = {"batch_invariant": True, **changes.get("fsdp", {})}
    backend = changes.get("backend", "fsdp:d1")
    others = {key: value for key, value in changes.items() if key not in ("backend", "fsdp")}
    assert ParallelDims.parse(backend).world_size <= 4
    with pytest.raises(ValueError, match=rf"fsdp\.batch_invariant = True with .*{name}"):
        create_engine(config(backend, fsdp=section, **others))


@pytest.mark.world(1)
def test_families_without_a_test_are_refused() -> None:
    with (
        pytest.raises(Exception, match=r"fsdp\.batch_invariant = True with model_type = 'mistral'"),
        started("fsdp:d1", path=family_dir("mistral"), fsdp={"batch_invariant": True}),
    ):
        pass
