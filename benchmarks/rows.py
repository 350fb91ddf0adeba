"""The rows of the table: a name, and the module that makes it run.

Modules are imported by the process of the row alone: what one row needs costs another neither time nor memory, and may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from benchmarks.workloads import Workload, load

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Task:
    """What a row has to do, as its process is told.

    Attributes:
        workload: a name, or the path of an ``.npz`` file.
        prompts: of how many groups of it; ``None`` is all.
        model: directory of the weights to begin with.
        dtype: of the compute; weights, moments and the log-softmax are float32.
        rank: which of the ``ranks`` data-parallel ranks this process is.
        lr, weight_decay, clip: of AdamW; clip is the largest gradient norm.
    """

    workload: str
    prompts: int | None
    model: str
    dtype: DType = "float32"
    rank: int = 0
    ranks: int = 1
    lr: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0

    def everything(self) -> Workload:
        """The sequences of all ranks."""
        whole = load(self.workload)
        return whole if self.prompts is None else whole.first_groups(self.prompts)

    def mine(self) -> Workload:
        """The sequences of this rank, in the order in which :meth:`Row.forward` answers."""
        whole = self.everything()
        return whole.take(whole.share(self.rank, self.ranks))


class Row(Protocol):
    """A row at work, in its own process."""

    can_forward: bool
    """Whether :meth:`forward` can be called."""

    def step(self) -> tuple[float, float]:
        """Take one optimizer step on the whole workload; returns its loss, and its gradient norm before clipping, over all ranks."""

    def forward(self) -> list[Tensor]:
        """Log-probs without a gradient: float ``[S_i]`` for each sequence of this rank, right wherever a token is trained."""


@dataclass(frozen=True)
class RowSpec:
    """A row that can be asked for.

    Attributes:
        name: of the table; ``{ranks}`` stands for the number of ranks.
        module: has ``build(task, **options) -> Row``.
        scales: whether it runs on several ranks.
        peer: the environment that it runs in, by the name of a folder in ``runs/peers``; ``None`` is this one.
    """

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    scales: bool = False
    peer: str | None = None

    def label(self, ranks: int) -> str:
        """The name in the table."""
        return self.name.format(ranks=ranks)


CEILING = "hand-written packed loop"
"""The row that ratios are to."""

ROWS: tuple[RowSpec, ...] = (
    RowSpec("areal fsdp:d{ranks}", "benchmarks.ours", scales=True),
    RowSpec("areal fsdp:d{ranks}, prefixes shared", "benchmarks.ours", {"share_prefixes": True}, scales=True),
    RowSpec("areal megatron:d{ranks}", "benchmarks.ours", {"engine": "megatron"}, scales=True),
    RowSpec(CEILING, "benchmarks.loops", {"loop": "packed"}, scales=True),
    RowSpec("hand-written, head where trained", "benchmarks.loops", {"loop": "packed, trained"}, scales=True),
    RowSpec("transformers, 8 padded a micro-batch", "benchmarks.loops", {"loop": "padded"}),
    RowSpec("transformers, 1 a micro-batch", "benchmarks.loops", {"loop": "single"}),
    RowSpec("transformers, packed, stock mask", "benchmarks.loops", {"loop": "stock"}),
)

PEERS: tuple[RowSpec, ...] = (
    RowSpec("TRL SFTTrainer, padding-free", "benchmarks.peers.trl", peer="trl"),
    RowSpec("verl FSDP engine, remove padding", "benchmarks.peers.verl", peer="verl"),
    RowSpec("torchtitan, its attention replaced", "benchmarks.peers.torchtitan", peer="torchtitan"),
)


def choose(parts: Sequence[str], peers: bool = False) -> list[RowSpec]:
    """The rows whose name has one of ``parts`` in it, and always the hand-written loop; all of them where ``parts`` is empty.

    Raises:
        ValueError: a part is in no name.
    """
    rows = [*ROWS, *(PEERS if peers else ())]
    for part in parts:
        if not any(part in row.label(1) for row in rows):
            raise ValueError(
                f"rows = {part!r}: it is in the name of no row; choose of {[row.label(1) for row in rows]}"
            )
    return [row for row in rows if not parts or row.name == CEILING or any(part in row.label(1) for part in parts)]


def build(module: str, task: Task, options: dict[str, Any]) -> Row:
    """Make a row ready to run, in this process."""
    if not Path(task.model).is_dir():
        raise ValueError(f"model = {task.model!r}: there is no such directory; write_model makes it")
    return import_module(module).build(task, **options)
