"""Everything that a compiled program depends on beside the shapes of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal.api.config import TrainEngineConfig
from areal.engine.jax.lora.contribution import FactorUse
from areal.engine.jax.mesh import STREAMS, bounds, gathered_spec, row_spec, stored_spec, ways
from areal.engine.jax.model.architecture import LAYER, Architecture
from areal.engine.jax.model.attention import block_on
from areal.engine.jax.model.fused_attention import GPUS, Kernel, kernel_for
from areal.engine.jax.model.products import Numbers, WeightUse

Params = Mapping[str, Array]
_T = TypeVar("_T")


@dataclass(frozen=True)
class ModelSpec:
    """Everything that a program depends on beside the shapes of its arguments. Hashable.

    Attributes:
        arch: the decoder.
        numbers: dtypes.
        mesh: devices of all ranks.
        recompute: compute each layer again in the backward, and keep only its input.
        fp32_head: multiply by the head's weight in float32.
        keep_bytes: memory for logits of one rank that are kept for the backward.
        trained: the parameters get gradients. With adapters they do not.
        kernel: computes the attention of streams in whole blocks without shared prefixes. ``None`` for blocks.
    """

    arch: Architecture
    numbers: Numbers
    mesh: Mesh
    recompute: bool
    fp32_head: bool
    keep_bytes: int
    trained: bool = True
    kernel: Kernel | None = None

    @classmethod
    def of(cls, config: TrainEngineConfig, arch: Architecture, mesh: Mesh, keep_bytes: int) -> ModelSpec:
        """Return what the programs of an engine depend on.

        Args:
            config: configuration of the engine.
            arch: the decoder.
            mesh: devices of all ranks. Their platform may have a kernel.
            keep_bytes: memory for logits, unless the configuration says.

        Raises:
            ValueError: ``deterministic`` on a GPU, where XLA has a switch of the process for it.
        """
        platform = mesh.devices.flat[0].platform
        if config.deterministic and platform in GPUS:
            raise ValueError(
                "deterministic = True with backend = 'jax:...' on a GPU: XLA reads this switch when a process starts; set "
                "XLA_FLAGS=--xla_gpu_deterministic_ops=true in its environment, and leave deterministic out"
            )
        numbers = Numbers(config.dtype, config.master_dtype, config.grad_reduce_dtype)
        kernel = kernel_for(platform, arch, numbers, config.dims.cp)
        keep = config.kept_logits_bytes
        return cls(
            arch,
            numbers,
            mesh,
            recompute=config.activation_checkpointing == "full",
            fp32_head=config.fp32_head,
            keep_bytes=keep_bytes if keep is None else keep,
            trained=config.lora is None,
            kernel=kernel if config.jax.attention_kernel else None,
        )

    @property
    def block(self) -> int:
        """Tokens of a block of attention."""
        return block_on(self.mesh.devices.flat[0].platform)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs; a mesh without devices has none."""
        return isinstance(self.mesh, Mesh) and bool(self.mesh.devices.flat[0].platform == "cpu")

    def use(self, name: str, shape: tuple[int, ...], dtype: Any = None, result: Any = None) -> WeightUse:
        """Return how a weight is used.

        Args:
            name: of its array.
            shape: of a whole array, or of a row of an array over layers.
            dtype: of the operands of products; ``None`` for the compute dtype.
            result: dtype of products; ``None`` for that of the operands.
        """
        rows = name.startswith(LAYER)
        stored = stored_spec(name, (1, *shape) if rows else shape, self.mesh)
        stored = row_spec(stored) if rows else stored
        compute = jnp.dtype(dtype or self.numbers.compute).name
        wide = len(shape) == 2 and shape[0] > shape[1]
        return WeightUse(
            compute,
            jnp.dtype(result or compute).name,
            self.numbers.reduce,
            NamedSharding(self.mesh, stored),
            NamedSharding(self.mesh, gathered_spec(stored)),
            self.trained,
            # Conversions to another dtype copy the operands anyway.
            input_first=wide and self.on_cpu and compute == self.numbers.reduce,
        )

    def use_of_factors(self, dtype: Any = None, result: Any = None) -> FactorUse:
        """Return how the factors of adapters are used. The dtypes are those of :meth:`use`."""
        by_token = NamedSharding(self.mesh, PartitionSpec(STREAMS, "cp"))
        compute = jnp.dtype(dtype or self.numbers.compute).name
        return FactorUse(compute, jnp.dtype(result or compute).name, self.numbers.reduce, by_token)

    def stored(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the placement of a whole array of parameters."""
        return NamedSharding(self.mesh, stored_spec(name, shape, self.mesh))

    def place(self, name: str, value: Array) -> Array:
        """Constrain a whole array of parameters or gradients to its placement."""
        return lax.with_sharding_constraint(value, self.stored(name, value.shape))

    @functools.cached_property
    def local_streams(self) -> range:
        """Indices of the streams that devices of this process compute."""
        shape = (ways(self.mesh, STREAMS),)
        indices = NamedSharding(self.mesh, PartitionSpec(STREAMS)).addressable_devices_indices_map(shape).values()
        streams = [bounds(index, shape)[0] for index in indices]
        return range(min(s.start for s in streams), max(s.stop for s in streams))

    def from_local(self, values: np.ndarray) -> Array:
        """Return a ``[D, ...]`` array of which this process has the rows ``values`` of its streams."""
        sharding = NamedSharding(self.mesh, PartitionSpec(STREAMS))
        shape, first = (ways(self.mesh, STREAMS), *values.shape[1:]), self.local_streams.start

        def row(index: tuple[slice, ...] | None) -> np.ndarray:
            start = bounds(index, shape)[0].start - first
            return values[start : start + 1]

        with self.numbers.enabled():
            return jax.make_array_from_callback(shape, sharding, row)

    def finished(self, results: _T) -> _T:
        """Return the results of a program: on CPUs of one process, after it has ended on all of them.

        Each of these devices has one thread. Two programs at once can take the threads that both need for their collectives.
        """
        several = len(self.mesh.local_devices) > 1 and self.on_cpu
        return jax.block_until_ready(results) if several else results

    def spread(self, x: Array, *axes: str | None) -> Array:
        """Constrain a ``[D, ...]`` array to one row for each data-parallel rank, and the given axes for the other dimensions."""
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(STREAMS, *axes)))
