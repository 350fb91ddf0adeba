"""Bytes of an engine's tensors, counted in the runtime of each engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.api import TrainEngine


def optimizer_tensors_of(engine: TrainEngine) -> list[Tensor]:
    """Return the optimizer state of this rank, without scalars."""
    inner = engine._components.optimizer.inner  # not exposed by the public interface
    chained = getattr(inner, "chained", None)
    optimizers = [inner] if chained is None else [wrapper.optimizer for wrapper in chained.chained_optimizers]
    tensors = [x for each in optimizers for values in each.state.values() for x in values.values() if x.dim()]
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def jax_bytes_on_device(engine: TrainEngine) -> dict[str, int]:
    """Return the bytes in the shards of a JAX engine."""
    model: Any = engine._components.model
    moments: Any = engine._components.optimizer.inner.moments
    kinds = {
        "params": list(model.params.values()),
        "grads": list((model.grads or {}).values()),
        "optimizer": [x for arrays in moments.values() for x in arrays.values()],
    }
    return {
        kind: sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards) for kind, arrays in kinds.items()
    }


def bytes_on_device(engine: TrainEngine) -> dict[str, int]:
    """Return the bytes in storages of weights, gradients and optimizer state."""
    if engine.dims.backend == "jax":
        return jax_bytes_on_device(engine)
    params = list(engine._components.model.parameters())
    # Megatron-Core's gradient buffers are main_grad.
    grads = [getattr(p, "main_grad", p.grad) for p in params]
    tensors = {
        "params": params,
        "grads": [x for x in grads if x is not None],
        "optimizer": optimizer_tensors_of(engine),
    }
    local = {kind: [x.to_local() if isinstance(x, DTensor) else x for x in values] for kind, values in tensors.items()}
    storages = {kind: {s._cdata: s for s in (x.untyped_storage() for x in values)} for kind, values in local.items()}
    return {kind: sum(storage.nbytes() for storage in unique.values()) for kind, unique in storages.items()}
