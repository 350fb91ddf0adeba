"""Tensor parallelism on the FSDP engine keeps this rank's tokens for the backward, not the gathered ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.fsdp import gathered_tokens
from areal.engine.fsdp.gathered_tokens import _GatheredLinear, keep_gathered
from areal.engine.fsdp.parallelize import transformer_layers
from areal.tests.grid.layouts import LORA
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.harness.tiny import global_batch, gradients_of, local_batch, loss, started
from areal.tests.harness.world import record

CASES = {
    "even": ({}, 0),
    "one key head": ({"num_key_value_heads": 1}, 0),
    "lora": ({}, 1),
    "several lora": ({"num_key_value_heads": 1}, 2),
}
"""Changes of the model, and the number of adapters that are trained instead of its weights, each on its own samples."""


def saved_of_a_layer(engine: Any, adapters: int = 0) -> tuple[dict[str, Tensor], int, int, int]:
    """Run a step. Returns gradients, the bytes that the first layer saves for the backward, those of its gathered tokens, and the number of
    gathers."""
    layer: Any = transformer_layers(engine._components.model[0])[0]
    trained = [x for name in engine.adapters.names for x in engine.adapters[name].parameters] if adapters else []
    inner, storages, tokens = layer.forward, {}, 0
    weights = {x.untyped_storage().data_ptr() for x in trained}

    def save(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            storages[x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()] = x
        return x

    def forward(hidden: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal tokens
        weights.update(p.to_local().untyped_storage().data_ptr() for p in layer.parameters())
        tokens += 2 * 2 * hidden.nbytes  # of two blocks on two ranks
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            return inner(hidden, *args, **options)

    layer.forward = forward
    with mock.patch.object(gathered_tokens, "all_gather_rows", wraps=gathered_tokens.all_gather_rows) as gathers:
        batch = local_batch(engine, global_batch()[:2])
        if adapters > 1:
            batch = [{**sample, "adapter": torch.tensor(k % adapters)} for k, sample in enumerate(batch)]
        engine.forward_backward(batch, loss, normalization="sum")
    layer.forward = inner
    gradients = gradients_of(engine)
    engine.zero_grad()
    return gradients, sum(nbytes for _, nbytes in storages), tokens, gathers.call_count


@pytest.mark.world(2)
@pytest.mark.parametrize(("changes", "adapters"), CASES.values(), ids=CASES)
def test_backward_keeps_the_tokens_of_this_rank(changes: dict[str, Any], adapters: int) -> None:
    path = model_dir("qwen3", **changes)
    options = {"path": path, "mb_spec": {"max_tokens_per_mb": 4096}, "lora": LORA if adapters else None}
    with started("fsdp:t2", **options) as engine:
        for k in range(adapters):
            engine.adapters.load(f"other{k}" if k else engine.adapters.selected, adapter_dir(path, LORA, seed=k))
        gradients, nbytes, of_tokens, gathers = saved_of_a_layer(engine, adapters)
        layers = transformer_layers(engine._components.model[0])
        for layer in layers:
            keep_gathered(layer)
        expected, bytes_of_gathered, _, none = saved_of_a_layer(engine, adapters)
    record(
        "bytes that a layer saves at t2", f"{changes} {adapters} adapters", gathered=bytes_of_gathered, shards=nbytes
    )
    # The inputs of attention and MLP: half of each is kept.
    assert bytes_of_gathered - nbytes == of_tokens / 2
    # In the backward, the linear layers of a block share one gather.
    assert (gathers, none) == (2 * len(layers), 0)
    assert gradients
    for name, gradient in gradients.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.world(2)
def test_recomputed_layers_gather_no_third_time() -> None:
    with started("fsdp:t2", activation_checkpointing="full") as engine:
        *_, gathers = saved_of_a_layer(engine)
    assert gathers == 0


def test_linear_layer_of_gathered_tokens_differentiates() -> None:
    """With a group of one rank, the tokens are the shard."""
    again = mock.Mock(uses=0, gather=lambda shard: shard)
    x, weight = torch.randn(1, 5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    inputs = [x.requires_grad_(), weight.requires_grad_(), torch.randn(4, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(lambda x, w, b: _GatheredLinear.apply(x, w, b, x[0].detach(), again), inputs)
    assert torch.equal(_GatheredLinear.apply(*inputs, x[0].detach(), again), F.linear(*inputs))
