"""The programs of a model, lowered for devices that are not there: shapes only, no array is made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import ShapeDtypeStruct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal.engine.jax import bridge, optimizer
from areal.engine.jax.mesh import AXES, STREAMS
from areal.engine.jax.model.architecture import Architecture, meta_model, parameters_of
from areal.engine.jax.model.attention import BLOCK, Visibility
from areal.engine.jax.model.decoder import Stream
from areal.engine.jax.model.fused_attention import kernel_for
from areal.engine.jax.model.products import Numbers
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model.token_outputs import Rows, Wanted

NUMBERS = Numbers("bfloat16", "float32", "float32")


@dataclass(frozen=True)
class Shapes:
    """A model on some devices, and one micro-batch, without their values.

    Args:
        config: configuration of transformers.
        devices: devices, of any platform; their number is that of ``layout``.
        layout: ranks along ``dp``, ``ep``, ``cp`` and ``tp``.
        tokens: tokens of each stream, whole blocks on each device.
        keep_bytes: memory for logits that are kept; 0 computes the head in chunks.
    """

    config: Any
    devices: Any
    layout: tuple[int, int, int, int]
    tokens: int
    keep_bytes: int = 2**30

    @cached_property
    def spec(self) -> ModelSpec:
        """What the programs depend on."""
        mesh = Mesh(np.array(self.devices, dtype=object).reshape(1, *self.layout), AXES)
        arch = Architecture.of(meta_model(self.config, torch.bfloat16))
        kernel = kernel_for(self.devices[0].platform, arch, NUMBERS, self.layout[2])
        return ModelSpec(
            arch, NUMBERS, mesh, recompute=True, fp32_head=False, keep_bytes=self.keep_bytes, kernel=kernel
        )

    def params(self) -> dict[str, Any]:
        """Return the parameters."""
        spec = self.spec
        infos = parameters_of(meta_model(self.config, torch.bfloat16), value_head=False)
        return {
            name: ShapeDtypeStruct(info.shape, jnp.float32, sharding=spec.stored(name, info.shape))
            for name, info in infos.items()
        }

    def inputs(self) -> tuple[Stream, Rows]:
        """Return one micro-batch."""
        streams, cp = self.layout[0] * self.layout[1], self.layout[2]
        sharding = NamedSharding(self.spec.mesh, PartitionSpec(STREAMS))

        def array(length: int, dtype: Any = jnp.int32) -> Any:
            return ShapeDtypeStruct((streams, length), dtype, sharding=sharding)

        blocks = self.tokens // min(self.tokens // cp, BLOCK)
        visibility = Visibility(array(self.tokens), array(self.tokens), array(blocks))
        rows = Rows(array(self.tokens), array(self.tokens), array(self.tokens, jnp.float32))
        return Stream(array(self.tokens), visibility), rows


def compile_all(shapes: Shapes) -> dict[str, Any]:
    """Compile every program of a training step and of an evaluation. Returns the compiled programs by name."""
    spec, params, inputs = shapes.spec, shapes.params(), shapes.inputs()
    wanted = Wanted(frozenset({"logprobs", "entropy"}), 0)
    with NUMBERS.enabled():
        evaluate = bridge._evaluate.lower(spec, wanted, params, *inputs).compile()
        forward = bridge._forward.lower(spec, wanted, params, {}, *inputs).compile()
        traced = jax.eval_shape(lambda *each: bridge._forward(spec, wanted, *each), params, {}, *inputs)
        out, _, residuals = jax.tree.map(
            lambda x, sharding: ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), traced, forward.output_shardings
        )
        arguments = ({}, *inputs)
        pull = bridge._pull.lower(spec, residuals, arguments, out, params, params).compile()
        moments = {kind: dict(params) for kind in ("exp_avg", "exp_avg_sq")}
        scalar = {name: ShapeDtypeStruct((), jnp.float32) for name in ("lr", "weight_decay", "beta1", "beta2", "eps")}
        counts = {name: ShapeDtypeStruct((), jnp.int32) for name in params}
        update = optimizer._update.lower(spec, "adamw", params, params, moments, counts, scalar).compile()
    return {"evaluate": evaluate, "forward": forward, "pull": pull, "update": update}
