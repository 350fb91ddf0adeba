"""The part of a model that one rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from areal.engine.checkpoint.tensor_layout import stored_tensors
from areal.engine.fsdp.pipeline.split import PipelineSplit, build_stage
from areal.engine.model.packed_lm import PackedCausalLM
from areal.utils.dtensor import reshard


class ModelChunks(nn.ModuleList):
    """A module for each pipeline stage of this rank; without a pipeline, one with the whole model.

    Names of tensors are those in the whole model, whose first name for a shared weight is the one that counts: where the output head is tied
    to the embedding, the last stage has a copy of it.

    Args:
        stage_models: of this rank, by stage.
        full_model: the model that they are parts of; its values are not looked at.
        rank: in the pipeline. group: the pipeline's ranks, or ``None``.
    """

    def __init__(
        self,
        stage_models: Mapping[int, PackedCausalLM],
        full_model: PackedCausalLM,
        split: PipelineSplit,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_models.values())
        self._full_model = (full_model,)  # in a tuple: a module's own modules are parts of it
        self.stages = list(stage_models)
        self.split, self.rank, self.group = split, rank, group
        first: dict[int, str] = {}
        self._first_names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in full_model.named_parameters(remove_duplicate=False)
        }

    @classmethod
    def cut(cls, full_model: PackedCausalLM, split: PipelineSplit, pipeline: DeviceMesh) -> ModelChunks:
        """This rank's part of a model on the meta device."""
        rank = pipeline.get_local_rank()
        stage_models = {stage: build_stage(full_model, split, stage) for stage in split.stages_of(rank)}
        return cls(stage_models, full_model, split, rank, pipeline.get_group() if pipeline.size() > 1 else None)

    @classmethod
    def of(cls, model: PackedCausalLM) -> ModelChunks:
        """A model that is all here."""
        return cls({0: model}, model, PipelineSplit.none())

    @property
    def full_model(self) -> PackedCausalLM:
        return self._full_model[0]

    def __iter__(self) -> Iterator[PackedCausalLM]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    def stored(self) -> list[tuple[str, Tensor]]:
        """This rank's stored tensors by name, copies of a tied weight included. Parameters are put back to their shards."""
        reshard(self)
        return [(self._first_names.get(name, name), x) for chunk in self for name, x in stored_tensors(chunk)]

    def copies(self) -> list[nn.Parameter]:
        """Copies of weights that an earlier stage has: equal to them always, and counted once."""
        reshard(self)
        return [p for chunk in self for name, p in chunk.named_parameters() if self._first_names[name] != name]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters among :meth:`stored` that are trained."""
        return [(name, x) for name, x in self.stored() if isinstance(x, nn.Parameter) and x.requires_grad]

    def own(self) -> list[tuple[str, Tensor]]:
        """As :meth:`stored`, without copies: over all stages, every tensor of the whole model once."""
        copies = {id(parameter) for parameter in self.copies()}
        return [(name, tensor) for name, tensor in self.stored() if id(tensor) not in copies]
