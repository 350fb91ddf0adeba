"""The part of a model that one rank has."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from areal.engine.disk_layout import stored_tensors
from areal.engine.fsdp.shards import reshard
from areal.engine.fsdp.split import Split, part_of
from areal.engine.model import PackedCausalLM


class Chunks(nn.ModuleList):
    """A module for each pipeline stage of this rank; without a pipeline, one with the whole model.

    Names of tensors are those in the whole model, whose first name for a shared weight is the one that counts: where the output head is tied
    to the embedding, the last stage has a copy of it.

    Args:
        whole: on the meta device. pipeline: its ranks.

    Attributes:
        whole: the whole model, with no values.
    """

    def __init__(self, whole: PackedCausalLM, split: Split, pipeline: DeviceMesh) -> None:
        self.stages = split.stages_of(pipeline.get_local_rank())
        super().__init__(part_of(whole, split, stage) for stage in self.stages)
        self._unlisted = (whole,)  # a module's own modules are parts of it
        self.split = split
        self.rank = pipeline.get_local_rank()
        self.group: dist.ProcessGroup | None = pipeline.get_group() if pipeline.size() > 1 else None
        first: dict[int, str] = {}
        self._first_names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in whole.named_parameters(remove_duplicate=False)
        }

    @property
    def whole(self) -> PackedCausalLM:
        return self._unlisted[0]

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
