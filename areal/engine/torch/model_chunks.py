"""The pipeline stages of a model that one rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from areal.engine.checkpoint.tensor_layout import stored_tensors
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.torch.pipeline_split import PipelineSplit, build_stage
from areal.utils.dtensor import reshard


class ModelChunks(nn.ModuleList):
    """A module for each pipeline stage of this rank; without a pipeline, a single one with the full model.

    Tensors have the names of the full model. A shared weight has its first name. If the output head is tied to the
    embedding, the last stage has a copy of the embedding.

    Args:
        stage_models: modules of this rank, by stage.
        full_model: full model. Its values are not used.
        split: distribution of the layers over stages.
        rank: rank in the pipeline.
        group: process group of the pipeline, or ``None``.
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
        self._full_model = (full_model,)  # in a tuple, so that it is not registered as a submodule
        self.stages = list(stage_models)
        self.split, self.rank, self.group = split, rank, group
        # Map all names of a shared parameter to the first one.
        first: dict[int, str] = {}
        self._first_names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in full_model.named_parameters(remove_duplicate=False)
        }

    @classmethod
    def cut(cls, full_model: PackedCausalLM, split: PipelineSplit, pipeline: DeviceMesh) -> ModelChunks:
        """Return this rank's stages of a model on the meta device."""
        rank = pipeline.get_local_rank()
        stage_models = {stage: build_stage(full_model, split, stage) for stage in split.stages_of(rank)}
        return cls(stage_models, full_model, split, rank, pipeline.get_group() if pipeline.size() > 1 else None)

    @classmethod
    def of(cls, model: PackedCausalLM) -> ModelChunks:
        """Return a single chunk with a full model, for engines without a pipeline."""
        return cls({0: model}, model, PipelineSplit.none())

    @property
    def full_model(self) -> PackedCausalLM:
        """The full model, of which the chunks are stages."""
        return self._full_model[0]

    def __iter__(self) -> Iterator[PackedCausalLM]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    def stored(self) -> list[tuple[str, Tensor]]:
        """Return this rank's stored tensors by name, including copies of a tied weight. Reshards gathered parameters."""
        reshard(self)
        return [(self._first_names.get(name, name), x) for chunk in self for name, x in stored_tensors(chunk)]

    def copies(self) -> list[nn.Parameter]:
        """Return copies of weights of an earlier stage. They always have the same values, and count once."""
        reshard(self)
        return [p for chunk in self for name, p in chunk.named_parameters() if self._first_names[name] != name]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters among :meth:`stored` that are trained."""
        return [(name, x) for name, x in self.stored() if isinstance(x, nn.Parameter) and x.requires_grad]

    def own(self) -> list[tuple[str, Tensor]]:
        """Return :meth:`stored` without copies: over all stages, every tensor of the full model once."""
        copies = {id(parameter) for parameter in self.copies()}
        return [(name, tensor) for name, tensor in self.stored() if id(tensor) not in copies]
