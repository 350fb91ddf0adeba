"""Rows of the table: names, and the modules that run them.

A module is imported only by the process of its row: dependencies of one row cost the others neither time nor memory, and may
be missing.
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
    """Input of a row's process.

    Attributes:
        workload: name, or path of an ``.npz`` file.
        prompts: number of groups to take from the workload; ``None`` for all.
        model: directory of the initial weights.
        dtype: dtype of the compute; weights, moments and the log-softmax are float32.
        rank: data-parallel rank of this process.
        ranks: number of data-parallel ranks.
        lr: learning rate of AdamW.
        weight_decay: weight decay of AdamW.
        clip: largest gradient norm.
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
        full = load(self.workload)
        return full if self.prompts is None else full.first_groups(self.prompts)

    def local_workload(self) -> Workload:
        """The sequences of this rank, in the order of the results of :meth:`Row.forward`."""
        full = self.everything()
        return full.take(full.shard_indices(self.rank, self.ranks))


class Row(Protocol):
    """A started row, in its own process."""

    can_forward: bool
    """True if :meth:`forward` is supported."""

    def step(self) -> tuple[float, float]:
        """Take one optimizer step on the full workload.

        Returns the loss and the gradient norm before clipping, over all ranks.
        """

    def forward(self) -> list[Tensor]:
        """Compute log-probs without a gradient: float ``[S_i]`` for each sequence of this rank, valid where a token is trained."""


@dataclass(frozen=True)
class RowSpec:
    """Definition of a row.

    Attributes:
        name: name in the table; ``{ranks}`` is replaced by the number of ranks.
        module: module with ``build(task, **options) -> Row``.
        scales: True if the row runs on several ranks.
        peer: folder in ``runs/peers`` with the row's environment; ``None`` for this one.
    """

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    scales: bool = False
    peer: str | None = None

    def label(self, ranks: int) -> str:
        """Return the name in the table."""
        return self.name.format(ranks=ranks)


CEILING = "hand-written packed loop"
"""Name of the row that ratios refer to."""

ROWS: tuple[RowSpec, ...] = (
    RowSpec("areal fsdp:d{ranks}", "benchmarks.engine_row", scales=True),
    RowSpec("areal fsdp:d{ranks}, prefixes shared", "benchmarks.engine_row", {"share_prefixes": True}, scales=True),
    RowSpec("areal megatron:d{ranks}", "benchmarks.engine_row", {"engine": "megatron"}, scales=True),
    RowSpec("areal jax:d{ranks}", "benchmarks.engine_row", {"engine": "jax"}, scales=True),
    RowSpec(CEILING, "benchmarks.loops", {"loop": "packed"}, scales=True),
    RowSpec("hand-written, head where trained", "benchmarks.loops", {"loop": "packed, trained"}, scales=True),
    RowSpec("transformers, 8 padded a micro-batch", "benchmarks.loops", {"loop": "padded"}),
    RowSpec("transformers, 1 a micro-batch", "benchmarks.loops", {"loop": "single"}),
    RowSpec("transformers, packed, stock mask", "benchmarks.loops", {"loop": "stock"}),
)

PEERS: tuple[RowSpec, ...] = (
    RowSpec("TRL SFTTrainer, padding-free", "benchmarks.peers.trl", peer="trl"),
    RowSpec("verl FSDP engine, remove padding", "benchmarks.peers.verl", peer="verl"),
    RowSpec("verl on areal fsdp:d1", "benchmarks.peers.verl", {"backend": "fsdp:d1"}, peer="verl"),
    RowSpec(
        "verl on areal fsdp:d1, prefixes shared",
        "benchmarks.peers.verl",
        {"backend": "fsdp:d1", "share_prefixes": True},
        peer="verl",
    ),
    RowSpec("torchtitan, its attention replaced", "benchmarks.peers.torchtitan", peer="torchtitan"),
)


def choose(patterns: Sequence[str], peers: bool = False) -> list[RowSpec]:
    """Return the rows whose name contains one of ``patterns``, and always the hand-written loop; all rows if ``patterns`` is empty.

    Raises:
        ValueError: no name contains a given string.
    """
    rows = [*ROWS, *(PEERS if peers else ())]
    for pattern in patterns:
        if not any(pattern in row.label(1) for row in rows):
            raise ValueError(
                f"rows = {pattern!r}: it is in the name of no row; choose of {[row.label(1) for row in rows]}"
            )
    return [
        row
        for row in rows
        if not patterns or row.name == CEILING or any(pattern in row.label(1) for pattern in patterns)
    ]


def build(module: str, task: Task, options: dict[str, Any]) -> Row:
    """Build a row in this process, ready to run."""
    if not Path(task.model).is_dir():
        raise ValueError(f"model = {task.model!r}: there is no such directory; write_model makes it")
    return import_module(module).build(task, **options)
