"""The named adapters of one engine."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from areal.api.batch import OptimStats
from areal.api.config import FinetuneSpec, TrainEngineConfig
from areal.api.memory import EngineMemory
from areal.api.sections.lora import LoRAConfig
from areal.api.step_settings import StepSettings
from areal.api.weights import NamedTensor
from areal.engine.checkpoint.async_save import CheckpointSaver, SaveTask
from areal.engine.lora.adapter import Adapter, AdapterLayout
from areal.engine.lora.adapter_files import adapter_files, read_training, write_files
from areal.engine.lora.adapter_plan import AdapterPlan
from areal.engine.lora.low_rank import LowRank, WeightDelta
from areal.engine.lora.mixed import MixedLowRank, mixed_pairs
from areal.engine.stream.layout import AdapterRuns
from areal.utils.distributed import ControlPlane
from areal.utils.functional import HeadUpdate

DEFAULT_NAME = "default"
"""Name of an engine's first adapter."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class AdapterSet:
    """Implements :class:`areal.api.adapters.Adapters`.

    Args:
        hf: configuration of the model.
        layout: placement of adapters on the ranks.
        config: configuration of the engine. One adapter with its ``lora`` settings is added and selected
            immediately.
        spec: length of each adapter's training.
        control: control plane over all ranks of the engine.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        layout: AdapterLayout,
        config: TrainEngineConfig,
        spec: FinetuneSpec,
        control: ControlPlane,
    ) -> None:
        self._hf, self._layout, self._config, self._spec, self._control = hf, layout, config, spec, control
        self._adapters: dict[str, Adapter] = {}
        self._plans: dict[LoRAConfig | None, AdapterPlan] = {}
        self._selected = DEFAULT_NAME
        self._on = True
        self.add(DEFAULT_NAME, config.lora)

    # ---- the interface

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    @property
    def selected(self) -> str:
        return self._selected

    def add(self, name: str, lora: LoRAConfig | None = None, *, seed: int | None = None) -> None:
        self._check_name_is_free(name)

        def make() -> Adapter:
            # The same seed gives the same adapter on all ranks.
            adapter = self._build(self._plan(lora or self._config.lora))
            adapter.draw(self._config.seed if seed is None else seed)
            return adapter

        self._add_or_raise(name, make, "no adapter was added")

    def select(self, name: str) -> None:
        self[name]
        self._selected = name

    def remove(self, name: str) -> None:
        self[name]
        # One adapter is always selected, so that the last one cannot be removed.
        if name == self._selected:
            raise ValueError(f"adapter {name!r} is selected: select another before removing it")
        del self._adapters[name]

    def save(
        self, name: str, path: str | Path, *, with_optim: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        self[name]

        def prepare(draft: Path) -> SaveTask:
            # Collective, although only the first rank has files to write.
            entries = {**(about or {}), "base": self._config.path, "optimizer": with_optim}
            return write_files(self.files(name, with_optim=with_optim), draft, entries)

        CheckpointSaver(self._control).save(Path(path), "peft", prepare)

    def load(self, name: str, path: str | Path, *, with_optim: bool = False) -> None:
        if name not in self._adapters:
            self._check_name_is_free(name)
        self._add_or_raise(name, lambda: self.read(Path(path), with_optim=with_optim), "no adapter was loaded")

    def peft_config(self) -> dict[str, Any]:
        return peft_format().file_config(self[self._selected].plan, self._config.path)

    def named_tensors(self) -> Iterator[NamedTensor]:
        return self[self._selected].named_tensors()

    # ---- for the engine

    def __getitem__(self, name: str) -> Adapter:
        """Return the adapter with a name.

        Raises:
            ValueError: there is no such adapter.
        """
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}: choose one of {', '.join(self._adapters)}, or add it")
        return self._adapters[name]

    @property
    def current(self) -> Adapter:
        """The adapter that is trained.

        Raises:
            RuntimeError: inside :meth:`off` no adapter is trained.
        """
        if not self._on:
            raise RuntimeError("inside reference() nothing is trained: leave it first")
        return self._adapters[self._selected]

    def applied(self, runs: AdapterRuns | None) -> Mapping[str, LowRank | MixedLowRank]:
        """Return the factors that are applied in a forward, by layer.

        Args:
            runs: runs of rows with one adapter; ``None`` for the selected adapter.
        """
        pairs = {name: adapter.pairs for name, adapter in self.active(runs).items()}
        if runs is not None and len(pairs) > 1:
            return mixed_pairs(pairs, runs)
        return next(iter(pairs.values()), {})

    def active(self, runs: AdapterRuns | None) -> dict[str, Adapter]:
        """Return the adapters of a forward by name; none inside :meth:`off`. Arguments as for :meth:`applied`."""
        names = (self._selected,) if runs is None else runs.names
        return {name: self[name] for name in names} if self._on else {}

    def head_update(self, layer: str, name: str | None = None) -> HeadUpdate | None:
        """Return the update of the output head ``layer`` by an adapter, by default the selected one; ``None`` without one."""
        pair = self[name or self._selected].pairs.get(layer) if self._on else None
        return None if pair is None else pair.head_update()

    def require(self, names: Sequence[str]) -> None:
        """Check that there are adapters with these names.

        Raises:
            ValueError: an adapter was removed.
        """
        for name in names:
            self[name]

    def gradients_of(self, names: Sequence[str]) -> AdapterGradients:
        """Return the gradients that a call adds to these adapters.

        Raises:
            RuntimeError: inside :meth:`off` no adapter is trained.
        """
        _ = self.current
        return AdapterGradients([self[name] for name in names])

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model computes without adapters."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def files(self, name: str, *, with_optim: bool) -> dict[str, bytes]:
        """Return the files of an adapter by name, on the first rank; other ranks return an empty dict. Collective."""
        return adapter_files(self[name], peft_format(), self._config.path, self._control, with_optim=with_optim)

    def read(self, folder: Path, *, with_optim: bool) -> Adapter:
        """Read an adapter from a directory, without communication.

        Raises:
            ValueError: see :meth:`areal.api.adapters.Adapters.load`.
        """
        base = None if self._config.init_from_scratch else self._config.path
        plan, weights = peft_format().read_folder(folder, self._hf, base)
        # Read everything before building, so that a damaged file changes nothing.
        settings = self._config.optimizer
        state = None if settings is None or not with_optim else read_training(folder, plan, settings.type)
        adapter = self._build(plan)
        adapter.fill(weights)
        if state is not None:
            adapter.resume(state)
        return adapter

    def replace(self, adapters: Mapping[str, Adapter], selected: str) -> None:
        """Replace all adapters by these."""
        self._adapters, self._selected = dict(adapters), selected

    def sum_gradients(self) -> None:
        """Sum the gradients of the selected adapter over ranks. Collective."""
        self.current.sum_gradients()

    def zero_grad(self) -> None:
        """Discard the gradients of the adapter that is trained."""
        self.current.zero_grad()

    def memory(self, device: torch.device) -> EngineMemory:
        """Return the bytes of all adapters on the engine's device."""
        return sum((adapter.memory(device) for adapter in self._adapters.values()), EngineMemory())

    def deltas(self) -> dict[str, WeightDelta]:
        """Return the weight updates of the selected adapter, by layer name; none inside :meth:`off`. Collective."""
        return self._adapters[self._selected].deltas() if self._on else {}

    def _add_or_raise(self, name: str, make: Callable[[], Adapter], note: str) -> None:
        """Build and add an adapter; if that fails on any rank, raise on all. Collective."""
        self._adapters[name] = self._control.attempt(make, note)

    def _plan(self, lora: LoRAConfig | None) -> AdapterPlan:
        """Return the plan of an adapter, which is kept: peft makes one on a second model, without values."""
        if lora not in self._plans:
            self._plans[lora] = peft_format().plan_adapter(self._hf, lora)
        return self._plans[lora]

    def _build(self, plan: AdapterPlan) -> Adapter:
        # Reject layers that no stage can adapt.
        for target in plan.targets:
            if target.key not in self._layout.layer_names:
                raise ValueError(
                    f"layer {target.key} cannot have an adapter: only linear layers of the decoder can, and a head whose product with the "
                    "last hidden state is all of the logits; choose lora.target_modules without it"
                )
        # A stage without adapters would not have anything to train.
        if not any(target.key in self._layout.layers for target in plan.targets):
            raise ValueError(
                "no layer of this pipeline stage would have an adapter: choose lora.target_modules with layers of every stage"
            )
        return Adapter(plan, self._layout, self._config.optimizer, self._spec)

    def _check_name_is_free(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"adapter name {name!r}: use letters, digits, '-', '_' and dots, and no dot first")
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already: remove it first, or choose another name")


class AdapterGradients:
    """The gradients that a call adds to the adapters which its samples name. Implements :class:`areal.engine.components.CallGradients`.

    A call adds to all of them, or to none: an error restores what was pending before.
    """

    on_error = "nothing was added to any pending gradient; the engine can be used for the next call"

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters

    def begin(self) -> None:
        for adapter in self._adapters:
            adapter.begin_call()

    def added(self) -> None:
        for adapter in self._adapters:
            adapter.pending.set(accumulated=True)

    def undo(self) -> None:
        for adapter in self._adapters:
            adapter.undo_call()

    def end(self) -> None:
        for adapter in self._adapters:
            adapter.end_call()


class SelectedOptimizer:
    """Steps the selected adapter. Implements :class:`areal.engine.components.StepOptimizer`."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters

    def _inner(self) -> Any:
        return self._adapters.current.optimizer

    @property
    def lr(self) -> float:
        return self._inner().lr

    def step(self, settings: StepSettings | None = None) -> OptimStats:
        return self._inner().step(settings)

    def set_lr(self, lr: float) -> None:
        self._inner().set_lr(lr)


def peft_format() -> Any:
    """Import :mod:`areal.engine.lora.peft_format` when the first engine with adapters is created: peft takes seconds.

    Raises:
        ValueError: peft is not installed.
    """
    try:
        return importlib.import_module("areal.engine.lora.peft_format")
    except ImportError as error:
        raise ValueError(f"lora needs peft ({error}): install areal[lora]") from error
