"""Adapters of a rollout: their factors, and the requests that they generate."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from areal.engine.lora.adapter_plan import AdapterPlan
from areal.engine.lora.adapter_set import peft_format
from areal.inference.local.invariant_replica import check_invariant_adapter


@dataclass(frozen=True)
class ServedFactors:
    """Factors of one linear layer: ``scale * up @ down``, with ``down`` ``[r, inputs]`` and ``up`` ``[outputs, r]``."""

    down: Tensor
    up: Tensor
    scale: float

    def add_to(self, out: Tensor, x: Tensor, rows: slice | Tensor) -> None:
        """Add the product to some rows of a layer's output, in place. Other rows keep their bits.

        Args:
            out: ``[T, outputs]``.
            x: ``[T, inputs]``. Input of the layer.
            rows: rows of both, each once.
        """
        low = F.linear(x[rows], self.down)
        if isinstance(rows, slice):
            out[rows].addmm_(low, self.up.t(), alpha=self.scale)
        else:
            # Rounded as in the other case.
            out.index_copy_(0, rows, torch.addmm(out[rows], low, self.up.t(), alpha=self.scale))


class ServedAdapter:
    """An adapter that requests can name.

    Attributes:
        number: above 0 and never used again in its rollout. Keys and values are shared between requests of one number.
        factors: factors by name of the layer in the model.
        users: number of requests in progress.
        removed: whether no further request may name it.
    """

    def __init__(self, number: int, factors: dict[str, ServedFactors]) -> None:
        self.number, self.factors = number, factors
        self.users, self.removed = 0, False
        self._stream: torch.Stream | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the factors."""
        for each in self.factors.values():
            yield from (each.down, each.up)

    def use_on(self, stream: torch.Stream | None) -> None:
        """Keep freed memory from being used again before a stream has read it. ``None`` on a device without streams."""
        if stream is not None and stream is not self._stream:
            for x in self.tensors():
                x.record_stream(stream)  # type: ignore[arg-type]
            self._stream = stream


class ServedAdapters:
    """The adapters of one rollout by name. Callers serialize all calls but :meth:`read`.

    Args:
        model: model that the adapters are applied to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Copied, because generation changes the attention in the model's own configuration.
        self._config = copy.deepcopy(model.config)
        self._plans: dict[str, AdapterPlan] = {}
        self._named: dict[str, ServedAdapter] = {}
        self._in_use: dict[int, ServedAdapter] = {}
        self._numbers = itertools.count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests can use."""
        return tuple(self._named)

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the factors of all adapters."""
        for adapter in {**{each.number: each for each in self._named.values()}, **self._in_use}.values():
            yield from adapter.tensors()

    def read(self, folder: Path) -> ServedAdapter:
        """Read an adapter from a directory in peft's format to the model's device and dtype.

        Raises:
            ValueError: the directory is damaged or of another model, or a batch-invariant replica does not support it.
        """
        base = self._config.name_or_path or None
        plan, weights = peft_format().read_folder(folder, self._config, base, self._plans)
        check_invariant_adapter(self._model, [target.key for target in plan.targets])
        device, dtype = self._model.device, self._model.dtype
        factors = {
            # Converted before they are moved: the copy to a device is complete when it returns.
            target.key: ServedFactors(
                weights[target.down].to(dtype).to(device), weights[target.up].to(dtype).to(device), target.scale
            )
            for target in plan.targets
        }
        return ServedAdapter(next(self._numbers), factors)

    def add(self, name: str, adapter: ServedAdapter) -> None:
        """Let requests name an adapter.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._named:
            raise ValueError(f"there is an adapter {name!r}: remove it, or choose another name")
        self._named[name] = adapter

    def remove(self, name: str) -> None:
        """Remove a name. Requests in progress keep the adapter, and its memory is freed after the last of them.

        Raises:
            ValueError: there is no such adapter.
        """
        self._check(name)
        adapter = self._named.pop(name)
        adapter.removed = True
        self._free(adapter)

    def begin(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter of a request that begins.

        Raises:
            ValueError: there is no such adapter.
        """
        if name is None:
            return None
        self._check(name)
        adapter = self._named[name]
        adapter.users += 1
        self._in_use[adapter.number] = adapter
        return adapter

    def end(self, adapter: ServedAdapter | None) -> None:
        """Record the end of a request."""
        if adapter is not None:
            adapter.users -= 1
            self._free(adapter)

    def _check(self, name: str) -> None:
        if name not in self._named:
            raise ValueError(
                f"there is no adapter {name!r}: add it, or choose one of {', '.join(self._named) or 'none'}"
            )

    def _free(self, adapter: ServedAdapter) -> None:
        if not adapter.users:
            self._in_use.pop(adapter.number, None)
            if adapter.removed:
                # The manager may keep names of ended requests: the factors must not wait for it.
                adapter.factors = {}
