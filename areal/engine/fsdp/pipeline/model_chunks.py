"""The part of a model that one rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from areal.engine.checkpoint.tensor_layout import stored_tensors
from areal.engine.fsdp.pipeline.split import Split, part_of
from areal.engine.model.packed_lm import PackedCausalLM
from areal.utils.dtensor import reshard


class ModelChunks(nn.ModuleList):
    """A module for each pipeline stage of this rank; without a pipeline, one with the whole model.

    Names of tensors are those in the whole model, whose first name for a shared weight is the one that counts: where the output head is tied
    to the embedding, the last stage has a copy of it.

    Args:
        parts: of this rank, by stage.
        whole: the model that they are parts of; its values are not looked at.
        rank: in the pipeline. group: the pipeline's ranks, or ``None``.
    """

    def __init__(
        self,
        parts: Mapping[int, PackedCausalLM],
        whole: PackedCausalLM,
        split: Split,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parts.values())
        self._whole = (whole,)  # in a tuple: a module's own modules are parts of it
        self.stages = list(parts)
        self.split, self.rank, self.group = split, rank, group
        first: dict[int, str] = {}
        self._first_names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in whole.named_parameters(remove_duplicate=False)
        }

    @classmethod
    def cut(cls, whole: PackedCausalLM, split: Split, pipeline: DeviceMesh) -> ModelChunks:
        """This rank's part of a model on the meta device."""
        rank = pipeline.get_local_rank()
        parts = {stage: part_of(whole, split, stage) for stage in split.stages_of(rank)}
        return cls(parts, whole, split, rank, pipeline.get_group() if pipeline.size() > 1 else None)

    @classmethod
    def of(cls, model: PackedCausalLM) -> ModelChunks:
        """A model that is all here."""
        return cls({0: model}, model, Split.none())

    @property
    def whole(self) -> PackedCausalLM:
        return self._whole[0]

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
