"""The FSDP engine on the meta device: its own code, without values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from areal.api import FinetuneSpec, MicroBatch, MicroBatchList, TokenOutputs, TrainEngineConfig
from areal.api.config import OptimizerConfig
from areal.engine.components import EngineComponents, call_gradients
from areal.engine.faults import Faults
from areal.engine.fsdp.engine import FSDPEngine
from areal.engine.lora.adapter import Adapter
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.random_init import materialize
from areal.utils.dtensor import local_part
from areal.utils.offload import expected_state_bytes
from areal.utils.releases import fsdp_param_groups


class PlannedEngine(FSDPEngine):
    """An FSDP engine in :func:`~areal.plan.planned_world.planned_world`.

    Args:
        config: configuration of the engine. The weights at ``path`` are not read.
        memory: bytes of a rank's device.
    """

    def __init__(self, config: TrainEngineConfig, memory: int) -> None:
        # Liger's kernels need CUDA: the engine would refuse them on the meta device.
        liger = None if config.fsdp.layer_kernels == "torch" else config.fsdp.layer_kernels
        for name, value in (("fsdp.compile", config.fsdp.compile), ("fsdp.layer_kernels", liger)):
            if value:
                raise ValueError(f"{name} = {value!r}: a plan does not support it; leave it out to plan the rest")
        super().__init__(config)
        self._memory = memory
        self._adapter: Adapter | None = None

    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        # Choices by memory are those on the device to plan for.
        self._device_memory = self._memory
        components: Any = super()._build(spec)
        if components.adapters is not None:
            self._adapter = components.adapters.current
            if components.optimizer is not None:
                _without_update(components.adapters.current.optimizer.inner)
        return components

    def _fill(self, chunks: ModelChunks) -> None:
        for chunk in chunks:
            materialize(chunk, self.device, self.device)
            for module in chunk.modules():
                # FSDP refuses parameters on the meta device, which usually were forgotten there.
                for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():
                    group._validate_no_meta_params = _nothing

    def _torch_optimizer(self, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> Optimizer:
        return _without_update(super()._torch_optimizer(named, config))

    @property
    def chunks(self) -> ModelChunks:
        """The sharded model of this rank."""
        return self._require_components().model  # type: ignore[return-value]

    @property
    def factors(self) -> list[nn.Parameter]:
        """The factors of the adapter that is trained; none if the model is."""
        return [] if self._adapter is None else self._adapter.parameters

    def parameter_bytes(self) -> int:
        """Return the bytes of this rank's shards of the parameters, with the padding of uneven shards, and of its adapter."""
        return _storage_bytes([*self.chunks.parameters(), *self.factors])

    def gradient_bytes(self) -> int:
        """Return the bytes of this rank's reduced gradients: those of what is trained. 0 without an optimizer."""
        if self._require_components().optimizer is None:
            return 0
        return _storage_bytes(self.factors or [parameter for _, parameter in self.chunks.trained()])

    def optimizer_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state after the first step, without scalars."""
        optimizer: Any = (self._adapter or self._require_components()).optimizer
        return 0 if optimizer is None else expected_state_bytes(optimizer.inner)

    def gather_once(self) -> None:
        """Gather every layer, as the first step of an engine does before its first forward."""
        for module in self.chunks.modules():
            if self.dims.pp == 1 and isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()

    def run_step(self, mbs: MicroBatchList) -> None:
        """Run what ``train_batch`` runs on tensors: forward, backward and the reduction of all micro-batches, and the optimizer step."""

        def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, None]:
            logprobs: Any = outputs.logprobs
            return -logprobs.sum(), None

        gradients = call_gradients(self._require_components(), None)
        gradients.begin()
        faults = Faults()
        self._run_schedule(mbs, process, ("logprobs",), False, faults)
        if faults.first is not None:
            raise faults.first
        gradients.added()
        if self._require_components().optimizer is not None:
            self._apply_gradients()
        else:
            self._reduced_components()
            self.zero_grad()


def _without_update(optimizer: Any) -> Optimizer:
    """Return an optimizer whose update does nothing: there are no values. The plan adds its cost. In place."""
    optimizer.step = _nothing
    return optimizer


def _storage_bytes(parameters: list[nn.Parameter]) -> int:
    """Return the bytes of the shards of parameters on this rank. A storage of several parameters counts once."""
    storages = [local_part(parameter).untyped_storage() for parameter in parameters]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _nothing(*args: Any, **options: Any) -> None:
    """Do nothing."""
