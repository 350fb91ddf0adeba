"""The arrays of a model on all ranks: parameters, gradients between optimizer steps, and which of them there are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from areal.api.config import torch_dtype
from areal.engine.jax.lora.factors import FactorStacks
from areal.engine.jax.mesh import bounds, distinct, from_boxes, to_numpy
from areal.engine.jax.model.architecture import ParameterInfo
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.spare import SpareResiduals
from areal.engine.optimizer import GradientState
from areal.utils.distributed import StateLostError
from areal.utils.dtensor import Box

Boxes = Sequence[tuple[Box, torch.Tensor]]
"""Boxes of an array, or of a weight, with their values in host memory."""


class ModelState:
    """Parameters and gradients of a model.

    Args:
        spec: the model.
        arrays: its arrays by name.

    Attributes:
        params: the parameters.
        grads: sums of gradients; ``None`` without any.
        accumulation: progress of the gradients.
        training: mode of the model, as of a torch module. The engine's families have no dropout.
        factors: the factors of adapters, if there are adapters.
        spare: memory for the residuals of the next micro-batch.
    """

    def __init__(self, spec: ModelSpec, arrays: Mapping[str, ParameterInfo]) -> None:
        self.spec, self.arrays = spec, arrays
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] | None = None
        self.accumulation = GradientState()
        self.training = True
        self.factors: FactorStacks | None = None
        self.spare = SpareResiduals(applies=spec.on_cpu and spec.mesh.size == 1)

    def train(self, mode: bool = True) -> None:
        """Set the mode."""
        self.training = mode

    def eval(self) -> None:
        """Leave the training mode."""
        self.training = False

    def require_grads(self) -> dict[str, Array]:
        """Return the gradients, zeros if there are none yet."""
        if self.grads is None:
            self.grads = self.zeros()
        return self.grads

    @contextlib.contextmanager
    def replacing_grads(self) -> Iterator[dict[str, Array]]:
        """Context of a program that consumes the gradients, and sets others. No gradient is pending if it did not, as after an interrupt."""
        grads, self.grads = self.require_grads(), None
        try:
            yield grads
        finally:
            if self.grads is None:
                self.accumulation.set(accumulated=False)

    def zeros(self, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return zeros of the shapes and placements of all parameters, or of some."""
        params = self.params if names is None else {name: self.params[name] for name in names}
        with self.spec.numbers.enabled():
            return self.spec.finished(_zeros(self.spec, params))

    def set_params(self, params: dict[str, Array]) -> None:
        """Replace all parameters; ``{}`` while they are in host memory."""
        self.params = params

    def set_grads(self, grads: dict[str, Array]) -> None:
        """Replace all gradients; ``{}`` for none."""
        self.grads = grads or None

    def boxes(self, name: str) -> list[Box]:
        """Return the boxes of an array of parameters that the devices of this process have, each once."""
        shape = self.arrays[name].shape
        indices = self.spec.stored(name, shape).addressable_devices_indices_map(shape).values()
        return [box for box, _ in distinct((bounds(index, shape), None) for index in indices)]

    def host_buffers(self, name: str) -> Boxes:
        """Return zeros in host memory for this process's boxes of an array of parameters."""
        dtype = torch_dtype(self.spec.numbers.master)
        return [(box, torch.zeros([s.stop - s.start for s in box], dtype=dtype)) for box in self.boxes(name)]

    def weights_in(self, name: str, boxes: Boxes) -> list[tuple[str, Boxes]]:
        """Return the weights of transformers in boxes of an array: for each its name, and the boxes of it, as views.

        Args:
            name: name of the array.
            boxes: this process's boxes, with their values.
        """
        info = self.arrays[name]
        if not info.stacked:
            return [(info.names[0], boxes)]
        rows: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for box, values in boxes:
            for weight, row in zip(info.names[box[0]], values, strict=True):
                rows.setdefault(weight, []).append((box[1:], row))
        return list(rows.items())

    def assembled(self, name: str, boxes: Boxes) -> Array:
        """Return an array that is placed as parameters are, of the values of all processes in their boxes.

        Args:
            name: name of the parameters.
            boxes: this process's boxes, with their values in host memory. They must not be changed later.
        """
        shape = self.arrays[name].shape
        with self.spec.numbers.enabled():
            return from_boxes(shape, self.spec.stored(name, shape), [(box, to_numpy(x)) for box, x in boxes])

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(int(np.prod(info.shape)) for info in self.arrays.values())

    @property
    def n_local(self) -> int:
        """Number of parameters that the devices of this process hold."""
        return sum(self.local_sizes.values())

    @property
    def local_sizes(self) -> dict[str, int]:
        """Number of elements of each array that the devices of this process hold."""
        return {name: sum(shard.data.size for shard in x.addressable_shards) for name, x in self.params.items()}


class ModelGradients:
    """Gradients of a model between optimizer steps. Implements :class:`areal.engine.components.Gradients`.

    Arrays are global values: each backward adds a sum over ranks.

    Args:
        model: owner of the gradients.
        discard: discards them, on the device or offloaded.
    """

    def __init__(self, model: ModelState, discard: Callable[[], None]) -> None:
        self._discard = discard
        self.state = model.accumulation

    def before_backward(self) -> None:
        """Do nothing: a reduced gradient counts once."""

    def zero(self) -> None:
        self._discard()


@contextlib.contextmanager
def consuming(given: Any, what: str, restore: Callable[[], None]) -> Iterator[None]:
    """Context of a program that consumes arrays: its results take their memory.

    Args:
        given: the arrays, in any structure.
        what: their name, for the error.
        restore: called after an error or interrupt that has left the arrays as they were.

    Raises:
        StateLostError: the program failed, and the arrays are lost.
        RuntimeError: the program failed, and the arrays are unchanged.
    """
    try:
        yield
    except BaseException as error:
        lost = any(x.is_deleted() for x in jax.tree.leaves(given))
        if not lost:
            restore()
        # An interrupt is raised as it is. The next call finds out what is lost.
        if not isinstance(error, Exception):
            raise
        text = f"{type(error).__name__}: {error}"
        if lost:
            raise StateLostError(f"the optimizer step failed, and the {what} are lost: {text}") from error
        # Errors of JAX may be of type ValueError, which would mean an argument of the caller.
        raise RuntimeError(f"the optimizer step failed, and left the {what} as they were: {text}") from error


def norm_of_gradients(model: ModelState) -> torch.Tensor:
    """Return the L2 norm of all gradients, a float64 scalar that is equal on every rank."""
    with jax.enable_x64(True):
        norm = model.spec.finished(_norm(model.require_grads()))
        return torch.tensor(float(norm.addressable_data(0)), dtype=torch.float64)


def scale_grads(model: ModelState, factor: float) -> None:
    """Multiply all gradients by a factor."""
    numbers = model.spec.numbers
    with (
        numbers.enabled(),
        model.replacing_grads() as grads,
        consuming(grads, "gradients", lambda: model.set_grads(grads)),
    ):
        model.grads = jax.block_until_ready(_scaled(model.spec, grads, jnp.asarray(factor, numbers.updates)))


@functools.partial(jax.jit, static_argnums=0)
def _zeros(spec: ModelSpec, params: dict[str, Array]) -> dict[str, Array]:
    return {name: spec.place(name, jnp.zeros_like(x)) for name, x in params.items()}


@jax.jit
def _norm(grads: dict[str, Array]) -> Array:
    return jnp.sqrt(sum(jnp.square(grad.astype(jnp.float64)).sum() for grad in grads.values()))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _scaled(spec: ModelSpec, grads: dict[str, Array], factor: Array) -> dict[str, Array]:
    return {name: spec.place(name, (grad * factor).astype(grad.dtype)) for name, grad in grads.items()}
