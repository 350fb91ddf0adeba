"""The life of an engine, and its state between steps: weights, gradients and optimizer state, and where they are."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from areal.api.checkpoint import SaveLoadMeta
from areal.api.config import FinetuneSpec, TrainEngineConfig
from areal.api.engine import TrainEngine
from areal.api.memory import EngineMemory
from areal.api.sections.backend import BackendConfig
from areal.api.weights import LocalTensor, NamedTensor, SelectName, stream_of
from areal.engine.agreement import check_ranks
from areal.engine.batch_rules import ContextCheck
from areal.engine.checkpoint.checkpointer import FolderWeights
from areal.engine.components import EngineComponents, StepOptimizer, TrainedAdapters
from areal.engine.loss_call import AdditivityProbe
from areal.engine.memory_limit import MemoryLimit
from areal.engine.options import TEMPLATE_OPTIONS, engine_config, process_dims
from areal.engine.pipeline_broadcast import Stages
from areal.engine.step_sync import StepSync
from areal.utils import platform
from areal.utils.distributed import ControlPlane, EngineLostError, init_default_group, rank_in_world
from areal.utils.group_set import GroupSet
from areal.utils.mesh import build_batch_mesh, describe_mesh, release_groups
from areal.utils.profiling.moved_bytes import MovedBytes
from areal.utils.profiling.phase_timer import PhaseTimer
from areal.utils.profiling.profiler import profiled
from areal.utils.seeding import seed_everything

logger = logging.getLogger(__name__)


class EngineState(TrainEngine):
    """An engine without its training step.

    Tensors in host memory are brought back before they are used.

    Args:
        config: its layout must be one that the engine supports (``layout_letters``).
    """

    layout_letters: ClassVar[frozenset[str]]
    """Letters of :data:`areal.api.parallel.LETTERS` that the engine supports."""

    supported_options: ClassVar[frozenset[str]] = TEMPLATE_OPTIONS
    """Dotted names of the options that the engine honours; others must have their defaults."""

    config_class: ClassVar[type[BackendConfig]] = BackendConfig
    """Type of the engine's section in :class:`TrainEngineConfig`; without fields by default."""

    @classmethod
    def ranks_per_process(cls, config: TrainEngineConfig) -> int:
        """Return the number of consecutive ranks of the layout that one process of torch.distributed is: its devices."""
        return 1

    @abstractmethod
    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        """Build the components: a hook of the template, see :class:`areal.engine.base.BaseTrainEngine`."""

    @abstractmethod
    def _reduced_components(self) -> EngineComponents:
        """Return the components, after the reduction of their gradients. Collective."""

    # ---- life

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = engine_config(type(self), config)
        self.dims = config.dims
        self.dims.check_supported(self.layout_letters)
        self._processes = process_dims(type(self), self.config)
        self.version = 0
        self.device = platform.current_device()
        self.timer = PhaseTimer(self.device)
        self.mesh: DeviceMesh
        self.control: ControlPlane
        self._last_stage = self.dims.pp - 1  # pipeline rank of the last stage
        self._components: EngineComponents | None = None
        self._unusable = "it is not initialized: call initialize(FinetuneSpec(...))"
        self._groups = GroupSet()  # process groups that carry tensors
        self._closers: list[Callable[[], None]] = []  # release references to them; called in reverse order
        self._started = False
        self._device_memory = 0  # bytes of the smallest device of all ranks
        self._additivity = AdditivityProbe()
        self._context = ContextCheck()
        self._moved = MovedBytes()  # since the last step

    def initialize(self, spec: FinetuneSpec) -> None:
        if self._components is not None:
            raise RuntimeError("the engine is already initialized: destroy it, or make another")
        # The process: default group, device, deterministic kernels.
        init_default_group()
        self.dims.check_world(dist.get_world_size(), self.ranks_per_process(self.config))
        self.device = platform.current_device()  # the group's start may have chosen it
        self.timer = PhaseTimer(self.device)
        platform.set_device(self.device)
        platform.keep_freed(self.device)
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True)
        # Process groups that this engine alone uses.
        self._groups = GroupSet(self.config.collective_timeout)
        self.control = ControlPlane(
            groups=self._groups, timeout=self.config.control_timeout, silence=self.config.heartbeat_timeout
        )
        self._started = True
        try:
            applied = self._build_together(spec)
        except Exception:
            self._teardown("it was not built: make another")
            self.control.close()
            raise
        if applied:
            logger.info("%s", applied)

    def _build_together(self, spec: FinetuneSpec) -> str:
        """Build the components, and what they need. An error on one rank is raised on all. Returns text for the log."""
        check_ranks(self.control, self.config, spec, self.device)
        self.mesh = build_batch_mesh(self._processes, self.device.type, self._groups)
        self._closers = [functools.partial(release_groups, self.mesh)]
        self._stages = Stages(self.mesh["pp"], self._last_stage)
        self._sync = StepSync(self.control, self.mesh, self._last_stage)
        limit, memory = self.config.memory_limit_mb, None if self.config.fsdp.cpu_offload else self.memory
        self._memory_limit = None if limit is None or platform.is_planned() else MemoryLimit(self.device, limit, memory)
        seed_everything(self.config.seed + self.dp_rank)
        self._device_memory = min(self.control.gather(platform.total_memory(self.device)))  # equal on all ranks

        # The model, the optimizer and the other components.
        def build() -> str:
            with self._ending_on_error("the engine was not built"):
                self._components = self._build(spec)
            return self._applied() if self.control.rank == 0 and logger.isEnabledFor(logging.INFO) else ""

        return self.control.attempt(build, "the engine was not built")

    def destroy(self) -> None:
        try:
            if self._components is not None and self.control.verdict is None:
                self._components.checkpointer.wait()
        finally:
            if self._closers:
                self._teardown("it was destroyed: make another")
            if self._started:
                self.control.close()

    def _teardown(self, why: str) -> None:
        """Release the components, and close the process groups. The error of later calls says ``why``."""
        # After a fault, cleaning up may meet the same error again.
        ended = self.control.verdict is not None
        quietly = functools.partial(contextlib.suppress, *([Exception] if ended else []))
        if ended:
            self._groups.abort()
        components, self._components, self._unusable = self._components, None, why
        if components is not None:
            with quietly():
                components.close()
        del components
        # Groups are in reference cycles, and their connections close with the last reference.
        gc.collect()
        while self._closers:
            with quietly():
                self._closers.pop()()
        with quietly():
            self._groups.close()
        gc.collect()
        with quietly():
            platform.release_unused(self.device)
            platform.empty_host_cache(self.device)

    def _teardown_after_fault(self) -> None:
        """Release everything after a fault that has ended the engine on all ranks."""
        if self._components is not None:
            self._teardown(str(self.control.verdict))

    @contextlib.contextmanager
    def _ending_on_error(
        self, note: str = "", *, unless: tuple[type[Exception], ...] = (ValueError,)
    ) -> Iterator[None]:
        """Context of work that other ranks wait for: an error inside ends the engine on every rank, and releases its components.

        Args:
            note: text to add to the error.
            unless: types of errors that are raised as they are. By default those of arguments, which are checked before any communication.
        """
        try:
            with self.control.ending_on_error(note, unless=unless):
                yield
        except EngineLostError:
            self._teardown_after_fault()
            raise

    def _require_components(self) -> EngineComponents:
        # The fault of another rank may have come between calls. It is raised once, like a fault in a call.
        if self._components is not None and self.control.verdict is not None:
            self._teardown_after_fault()
            if not self.control.was_raised:
                self.control.require_usable()
        if self._components is None:
            raise RuntimeError(f"the engine cannot be used: {self._unusable}")
        return self._components

    # ---- log

    def _applied(self) -> str:
        """Describe what was applied, one line for each item. No communication."""
        config, components = self.config, self._require_components()
        compute, master, reduce = config.dtype, config.master_dtype, config.grad_reduce_dtype
        ranks, processes = self.dims.world_size, self._processes.world_size
        where = "" if ranks == processes else f" in {processes} processes"
        items = {
            "layout": f"{self.dims}, ranks: {ranks}{where}, batch mesh {describe_mesh(self.mesh)}",
            **components.applied,
            "precision": f"compute in {compute}, master parameters in {master}, gradient reduction in {reduce}",
            **_parameters(components.n_parameters, components.n_local_parameters),
            "communication": f"{platform.collective_backend()}, device {self.device}",
        }
        return f"{type(self).__name__} of {config.path}" + "".join(
            f"\n  {name}: {text}" for name, text in items.items()
        )

    # ---- coordinates in the layout

    @property
    def dp_rank(self) -> int:
        # Of the layout, so that a loader can be made before the engine is initialized.
        return self._processes.coordinates(rank_in_world())["dp"]

    @property
    def dp_size(self) -> int:
        return self._processes.dp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.mesh["dp"].get_group()

    @property
    def is_main(self) -> bool:
        coordinates = self._processes.coordinates(rank_in_world())
        return not any(coordinates[axis] for axis in ("pp", "cp", "tp"))

    def evaluating(self) -> AbstractContextManager[None]:
        return self._require_components().evaluating()

    def set_version(self, version: int) -> None:
        self.version = version

    # ---- weights and gradients

    def named_tensors(
        self, *, dtype: torch.dtype | None = None, select: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        components = self._require_components()
        with self._ending_on_error():
            components.memory.onload(params=True, grads=False, optimizer=False)
        chosen = (
            NamedTensor(name, tensor if dtype is None else tensor.to(dtype))
            for name, tensor in stream_of(components.weights, dtype)
            if select is None or select(name)
        )
        return self._stream(chosen)

    def local_tensors(
        self, *, dtype: torch.dtype | None = None, select: SelectName | None = None
    ) -> Iterator[LocalTensor]:
        components = self._require_components()
        weights = components.weights
        if not isinstance(weights, FolderWeights):
            raise RuntimeError(f"{type(weights).__name__} has no export(), from which local tensors are read")
        with self._ending_on_error():
            components.memory.onload(params=True, grads=False, optimizer=False)
            export = weights.export()
        shapes = {spec.name: tuple(spec.shape) for spec in export.specs}
        # Values are computed when they are read.
        values = ((part, part.values) for part in export.slices if select is None or select(part.name))
        return (
            LocalTensor(part.name, tensor if dtype is None else tensor.to(dtype), part.box, shapes[part.name])
            for part, tensor in values
        )

    def named_gradients(self) -> Iterator[NamedTensor]:
        components = self._reduced_components()
        with self._ending_on_error():
            components.memory.onload(params=True, grads=True, optimizer=False)
        return self._stream(components.weights.named_gradients())

    def _stream(self, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield tensors that all ranks gather together. An error on one rank is raised on all."""
        while True:
            with self._ending_on_error(unless=()):
                self.control.require_usable()
                tensor = next(tensors, None)
                # After a fault, a collective may return without its values: the stream ends only if it was complete on all ranks.
                if tensor is None:
                    self.control.gather(None)
                    return
            yield tensor

    # ---- checkpoints

    def save(self, meta: SaveLoadMeta) -> None:
        components = self._require_components()
        with self._ending_on_error():
            components.memory.onload(params=True, grads=False, optimizer=meta.has_optimizer)
            components.checkpointer.save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        components = self._require_components()
        self.zero_grad()
        with self._ending_on_error():
            components.memory.onload(params=True, grads=False, optimizer=meta.has_optimizer)
            components.checkpointer.load(meta)

    def wait_for_checkpoint(self) -> None:
        checkpointer = self._require_components().checkpointer
        with self._ending_on_error():
            checkpointer.wait()

    # ---- memory

    def offload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        memory, reserved = self._require_components().memory, platform.reserved_bytes(self.device)
        with self._ending_on_error():
            nbytes = memory.offload(params=params, grads=grads, optimizer=optimizer)
        platform.release_unused(self.device)  # for an inference engine on this device
        self._moved.totals["offloaded_bytes"] += nbytes
        if self.control.rank == 0:
            returned = reserved - platform.reserved_bytes(self.device)
            logger.info(
                "offload: %s bytes moved from %s, %s bytes returned to it", f"{nbytes:,}", self.device, f"{returned:,}"
            )

    def onload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        memory = self._require_components().memory
        with self._ending_on_error():
            memory.onload(params=params, grads=grads, optimizer=optimizer)

    def memory(self) -> list[EngineMemory]:
        components = self._require_components()
        report = components.memory.report(self.device)
        return [report if components.adapters is None else report + components.adapters.memory(self.device)]

    def _onload_for_step(self, *, grads: bool = False, optimizer: bool = False) -> None:
        """Bring back the tensors that a step needs. Its metrics report the bytes."""
        memory, moved = self._require_components().memory, self._moved.totals
        with self._ending_on_error():
            moved["onloaded_bytes"] += memory.onload(params=True, grads=grads, optimizer=optimizer)

    # ---- the optimizer's settings

    def _require_optimizer(self) -> StepOptimizer:
        optimizer = self._require_components().optimizer
        if optimizer is None:
            raise RuntimeError(
                "the engine has no optimizer: set TrainEngineConfig.optimizer=OptimizerConfig(...) to train"
            )
        return optimizer

    @property
    def lr(self) -> float:
        return self._require_optimizer().lr

    def set_lr(self, lr: float) -> None:
        self._require_optimizer().set_lr(lr)

    # ---- adapters

    @property
    def adapters(self) -> TrainedAdapters:
        adapters = self._require_components().adapters
        if adapters is None:
            raise RuntimeError("the engine has no adapters: set TrainEngineConfig.lora=LoRAConfig(...) to train some")
        return adapters

    def reference(self) -> AbstractContextManager[None]:
        if self._require_components().adapters is None:
            raise RuntimeError(
                "the engine trains the model itself, and has no other: make a second engine without an optimizer, or set lora=LoRAConfig(...)"
            )
        return self.adapters.off()

    def profile(
        self, folder: str | Path, *, memory: bool = True, stacks: bool = False
    ) -> AbstractContextManager[dict[int, Path]]:
        self._require_components()
        return profiled(self.timer, self.device, self.control.rank, folder, memory=memory, stacks=stacks)


def _parameters(total: int | None, local: int | None) -> dict[str, str]:
    return {} if total is None or local is None else {"parameters": f"{total:,} in total, {local:,} on rank 0"}
