"""The programs of a model, compiled for devices that are not there: shapes only, no array is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.jax import bridge, optimizer
from areal.engine.jax.inputs import bucket, row_bucket
from areal.engine.jax.mesh import STREAMS, check_experts_of, mesh_of, ways
from areal.engine.jax.model.architecture import Architecture, ParameterInfo, meta_model, parameters_of
from areal.engine.jax.model.attention import Visibility
from areal.engine.jax.model.decoder import Stream
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model.token_outputs import Rows, Wanted
from areal.engine.jax.model_arrays import ModelState
from areal.engine.model.hub import read_config
from areal.utils.functional.logprobs import default_keep_bytes

LOGPROBS = Wanted(frozenset({"logprobs"}), 0)
"""The outputs that a training step computes by default."""

Shapes = dict[str, ShapeDtypeStruct]


@dataclass(frozen=True)
class Programs:
    """The programs of an engine, without values.

    Args:
        spec: the model on its devices.
        infos: arrays of parameters by name.
        tokens: tokens of a stream's micro-batch, unpadded; each has outputs.
        wanted: outputs to compute.
    """

    spec: ModelSpec
    infos: dict[str, ParameterInfo]
    tokens: int
    wanted: Wanted = LOGPROBS

    @classmethod
    def of(cls, config: TrainEngineConfig, devices: Sequence[jax.Device], tokens: int, **options: Any) -> Programs:
        """Return the programs of an engine.

        Args:
            config: its configuration. Of the model, ``config.json`` is read.
            devices: one for each rank of the layout, of any platform.
            tokens: tokens of a stream's micro-batch.

        Raises:
            ValueError: the engine does not compute the model, or does not support the layout.
        """
        hf = meta_model(read_config(config.path), torch_dtype(config.master_dtype))
        arch = Architecture.of(hf)
        check_experts_of(config.dims, arch.experts.n_experts if arch.experts else None)
        # As in the engine, whose torch device is a CPU on hosts of TPUs, too.
        keep = default_keep_bytes(torch.device("cpu"))
        spec = ModelSpec.of(config, arch, mesh_of(config.dims, devices), keep)
        return cls(spec, parameters_of(hf, value_head=config.value_head), tokens, **options)

    @cached_property
    def params(self) -> Shapes:
        """The parameters. Gradients and moments have their shapes, dtypes and placements."""
        return {
            name: ShapeDtypeStruct(info.shape, self.spec.numbers.master, sharding=self.spec.stored(name, info.shape))
            for name, info in self.infos.items()
        }

    @cached_property
    def inputs(self) -> tuple[Stream, Rows]:
        """One micro-batch of each stream, padded as the engine pads it."""
        cp = self.spec.mesh.shape["cp"]
        part = bucket(-(-self.tokens // cp))
        length, rows = cp * part, cp * row_bucket(-(-self.tokens // cp), part)
        sharding = NamedSharding(self.spec.mesh, PartitionSpec(STREAMS))

        def array(n: int, dtype: Any = jnp.int32) -> Any:
            return ShapeDtypeStruct((ways(self.spec.mesh, STREAMS), n), dtype, sharding=sharding)

        visibility = Visibility(array(length), array(length), array(length // min(part, self.spec.block)))
        return Stream(array(length), visibility), Rows(array(rows), array(rows), array(rows, self.spec.numbers.stats))

    def evaluation(self) -> Any:
        """Compile the forward without a backward."""
        with self.spec.numbers.enabled():
            return bridge._evaluate.lower(self.spec, self.wanted, self.params, *self.inputs).compile()

    def forward_and_backward(self) -> tuple[Any, Any, Any]:
        """Compile the forward and its backward. Returns both, and the shapes of the residuals that are kept between them."""
        spec, params, inputs = self.spec, self.params, self.inputs
        with spec.numbers.enabled():
            forward = bridge._forward.lower(spec, self.wanted, params, {}, *inputs, ()).compile()
            # The compiler chooses where the residuals are.
            traced = jax.eval_shape(lambda *each: bridge._forward(spec, self.wanted, *each), params, {}, *inputs, ())
            out, _, residuals = jax.tree.map(
                lambda x, sharding: ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                traced,
                forward.output_shardings,
            )
            backward = bridge._pull.lower(spec, residuals, ({}, *inputs), out, params, params).compile()
        return forward, backward, residuals

    def moments(self, config: OptimizerConfig) -> dict[str, Shapes]:
        """Return the moments of an optimizer by kind."""
        names = self._optimizer(config).names
        return {kind: {name: self.params[name] for name in own} for kind, own in names.items()}

    def update(self, config: OptimizerConfig) -> Any:
        """Compile the step of an optimizer."""
        spec, params = self.spec, self.params
        settings = optimizer.scalars(self._optimizer(config).param_groups[0])
        counts = ShapeDtypeStruct((len(params),), jnp.int32)
        values = ShapeDtypeStruct((len(settings),), spec.numbers.updates)
        with spec.numbers.enabled():
            arguments = (params, params, self.moments(config), counts, values)
            return optimizer._update.lower(
                spec, optimizer.Rule(config.type, config.muon), tuple(settings), *arguments
            ).compile()

    def _optimizer(self, config: OptimizerConfig) -> optimizer.OptaxOptimizer:
        return optimizer.OptaxOptimizer(ModelState(self.spec, self.infos), config)


def device_bytes(arrays: Any) -> int:
    """Return the bytes of arrays on one device, from their shapes and placements."""
    leaves = jax.tree.leaves(arrays)
    return sum(
        ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype).size * jnp.dtype(x.dtype).itemsize for x in leaves
    )
