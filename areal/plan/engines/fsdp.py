"""The FSDP engine on the meta device: its own code, without values."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from areal.api import MicroBatchList, TrainEngineConfig
from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.fsdp.engine import FSDPEngine
from areal.engine.fsdp.gradients import trained_elements
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.muon.matrices import matrices_of
from areal.engine.torch.muon.optimizer import Muon
from areal.engine.torch.random_init import materialize
from areal.plan.engines.matrix_parts import PartsOfRanks
from areal.plan.engines.planned_step import NotPlannedError, PlannedStep, nothing, without_update
from areal.plan.step_recorder import StepRecorder
from areal.utils.dtensor import local_part
from areal.utils.mesh import group_of_all_ranks
from areal.utils.offload import expected_state_bytes, storage_bytes
from areal.utils.releases import fsdp_param_groups


class PlannedEngine(PlannedStep, FSDPEngine):
    """An FSDP engine in :func:`~areal.plan.planned_world.planned_world`.

    Args:
        config: configuration of the engine. The weights at ``path`` are not read.
        memory: bytes of a rank's device.
    """

    def __init__(self, config: TrainEngineConfig, memory: int) -> None:
        # Liger's kernels need CUDA: the engine would refuse them on the meta device.
        liger = None if config.fsdp.layer_kernels == "torch" else config.fsdp.layer_kernels
        options = {"compile": config.fsdp.compile, "layer_kernels": liger, "cpu_offload": config.fsdp.cpu_offload}
        for name, value in options.items():
            if value:
                raise NotPlannedError(f"fsdp.{name}", value)
        super().__init__(config, memory)
        self._matrices: list[nn.Parameter] = []

    def _fill(self, chunks: ModelChunks) -> None:
        for chunk in chunks:
            materialize(chunk, self.device, self.device)
            for module in chunk.modules():
                # FSDP refuses parameters on the meta device, which usually were forgotten there.
                for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():
                    group._validate_no_meta_params = nothing

    def _torch_optimizer(
        self, chunks: ModelChunks, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig
    ) -> Optimizer:
        if config.type != "muon":
            return without_update(super()._torch_optimizer(chunks, named, config))
        # Muon's updates of matrices run, and the recorder counts them. Those of other parameters are AdamW's.
        kinds = matrices_of(chunks.full_model, chunks.full_model.hf.config)
        matrices = [(name, parameter) for name, parameter in named if name in kinds]
        self._matrices = [parameter for _, parameter in matrices]
        control = PartsOfRanks(matrices, self.dims.pp)
        optimizer: Any = Muon(named, kinds, config, control, group_of_all_ranks(self._groups))
        optimizer.step = optimizer.update_matrices
        return optimizer  # type: ignore[no-any-return]

    @property
    def chunks(self) -> ModelChunks:
        """The sharded model of this rank."""
        return self._require_components().model  # type: ignore[return-value]

    def trained_elements(self) -> tuple[int, int]:
        """Return the elements of :func:`areal.engine.fsdp.gradients.trained_elements`."""
        return trained_elements(self.chunks)

    def parameter_bytes(self) -> int:
        """Return the bytes of this rank's shards of the parameters, with the padding of uneven shards, and of its adapter."""
        return storage_bytes([*self.chunks.parameters(), *self.factors])

    def gradient_bytes(self) -> int:
        """Return the bytes of this rank's reduced gradients: those of what is trained. 0 without an optimizer."""
        if self._require_components().optimizer is None:
            return 0
        return storage_bytes(self.factors or [parameter for _, parameter in self.chunks.trained()])

    def optimizer_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state after the first step, without scalars."""
        optimizer: Any = (self._adapter or self._require_components()).optimizer
        return 0 if optimizer is None else expected_state_bytes(optimizer.inner)

    @property
    def head_rows(self) -> int:
        heads: list[Any] = [chunk.hf.get_output_embeddings() for chunk in self.chunks if chunk.has_head]
        return -(-heads[0].weight.shape[0] // self.dims.tp) if heads else 0

    def warm_up(self, mbs: MicroBatchList) -> None:
        # The first step of an engine gathers every layer before its first forward.
        for module in self.chunks.modules():
            if self.dims.pp == 1 and isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()

    def watch(self, recorder: StepRecorder) -> None:
        recorder.watch(self.chunks, self.factors)

    def held_bytes(self) -> dict[str, int]:
        # Gradients are released at the end of a step.
        return {"parameters": self.parameter_bytes(), "gradients": 0, "optimizer": self.optimizer_bytes()}

    def update_bytes(self) -> int:
        # AdamW reads parameters, gradients and state, and writes parameters and state. Muon's matrices have a momentum of their size.
        state = self.optimizer_bytes() - sum(local_part(matrix).nbytes for matrix in self._matrices)
        return 3 * (self.gradient_bytes() - storage_bytes(self._matrices)) + 2 * state if state else 0
