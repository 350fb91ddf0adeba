"""What the comparisons range over: layouts of each engine, options of its configuration, dtypes and their tolerances.

A new engine joins when it registers its entry point, with the layouts ``d1`` and ``d2``; with an entry in :data:`LAYOUTS`, with those
it names. A new family joins in :mod:`areal.tests.models`, an objective in ``losses``, a batch or a cut in ``cases``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.api import OptimizerConfig, ParallelDims, TrainEngineConfig
from areal.engine.registry import engine_names
from areal.tests.cases import CASES, CUTS, Case
from areal.tests.losses import OBJECTIVES, Objective
from areal.tests.models import FAMILIES, model_dir


@dataclass(frozen=True)
class Layout:
    """One layout of one engine.

    Attributes:
        backend: such as ``fsdp:d2c2``.
        how: a word where one backend has several ways, such as ``ulysses``.
        options: fields of the engine's configuration.
        refuses: families that it cannot run.
    """

    backend: str
    how: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Backend and way."""
        return f"{self.backend}-{self.how}" if self.how else self.backend

    @property
    def world(self) -> int:
        """Ranks that it takes."""
        return ParallelDims.parse(self.backend).world_size

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return ParallelDims.parse(self.backend).backend


def _context_parallel(letters: str) -> tuple[Layout, Layout]:
    return (
        # The 9 heads of smollm divide by no degree here.
        Layout(f"fsdp:{letters}", "ulysses", {"fsdp": {"context_parallel": "ulysses"}}, refuses=("smollm",)),
        Layout(f"fsdp:{letters}", "gather_kv", {"fsdp": {"context_parallel": "gather_kv"}}),
    )


LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "fsdp": (
        Layout("fsdp:d1"),
        Layout("fsdp:d2"),
        Layout("fsdp:r2"),
        *_context_parallel("c2"),
        Layout("fsdp:d4"),
        Layout("fsdp:r2d2"),
        *_context_parallel("d2c2"),
        *_context_parallel("c4"),
        Layout("fsdp:r2c2"),
    ),
}

OPTIONS: dict[str, dict[str, Mapping[str, Any]]] = {
    "fsdp": {
        "plain": {},
        "recompute": {"activation_checkpointing": "full"},
        "sync_each": {"grad_sync": "micro_batch"},
        "keep_gathered": {"fsdp": {"reshard_after_forward": False}},
        "host": {"fsdp": {"cpu_offload": True}},
    },
}

TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 8e-2}
"""Largest error against the float64 reference, by the dtype of the compute: of losses, metrics, outputs and gradient norms."""

GRADIENT_TOLERANCES = {**TOLERANCES, "bfloat16": 2.5e-1}
"""Of the entries of a gradient, over its largest. In bf16 some of the 32 columns of these models lose most of their digits."""


def all_layouts() -> list[Layout]:
    """The layouts of every engine that is installed."""
    return [
        layout for name in engine_names() for layout in LAYOUTS.get(name, (Layout(f"{name}:d1"), Layout(f"{name}:d2")))
    ]


def all_options(engine: str) -> dict[str, Mapping[str, Any]]:
    """Options of an engine's configuration by name."""
    return OPTIONS.get(engine, {"plain": {}})


@dataclass(frozen=True)
class Cell:
    """One point of the grid: what an engine is made of, and what it is given."""

    layout: Layout
    family: str = "qwen3"
    objective_name: str = "nll"
    case_name: str = "ragged"
    cut: str = "whole"
    options: str = "plain"
    dtype: str = "float64"

    def __str__(self) -> str:
        return "-".join(
            [self.layout.name, self.family, self.objective_name, self.case_name, self.cut, self.options, self.dtype]
        )

    @property
    def objective(self) -> Objective:
        """The loss and its weight."""
        return OBJECTIVES[self.objective_name]

    @property
    def case(self) -> Case:
        """The global batch."""
        return CASES[self.case_name]

    @property
    def tolerance(self) -> float:
        """Largest error that passes, except in gradients."""
        return TOLERANCES[self.dtype]

    @property
    def gradient_tolerance(self) -> float:
        """Largest error of gradients that passes."""
        return GRADIENT_TOLERANCES[self.dtype]

    @property
    def path(self) -> str:
        """The model's directory."""
        return model_dir(self.family, value_head=True) if self.objective.value_head else model_dir(self.family)

    def config(self, optimizer: OptimizerConfig) -> TrainEngineConfig:
        """The engine's configuration."""
        wide = "float64" if self.dtype == "float64" else "float32"
        fields: dict[str, Any] = {
            "path": self.path,
            "backend": self.layout.backend,
            "dtype": self.dtype,
            "master_dtype": wide,
            "grad_reduce_dtype": wide,
            "value_head": self.objective.value_head,
            "temperature": self.case.temperature,
            "mb_spec": CUTS[self.cut],
            "optimizer": optimizer,
        }
        for more in (self.layout.options, all_options(self.layout.engine)[self.options]):
            for name, value in more.items():
                fields[name] = {**fields.get(name, {}), **value} if isinstance(value, Mapping) else value
        return TrainEngineConfig(**fields)


FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(all_layouts()),
    "family": tuple(FAMILIES),
    "objective_name": tuple(OBJECTIVES),
    "case_name": tuple(CASES),
    "cut": tuple(CUTS),
    "options": tuple(sorted({name for engine in engine_names() for name in all_options(engine)})),
    "dtype": tuple(TOLERANCES),
}
"""The fields of a cell and their values."""


def fits(fields: Mapping[str, Any]) -> bool:
    """Whether a cell with these fields can be: those that are missing are still open."""
    layout, family, options = fields.get("layout"), fields.get("family"), fields.get("options")
    if layout is not None and family in layout.refuses:
        return False
    if layout is not None and options is not None and options not in all_options(layout.engine):
        return False
    # In bf16 a token near a tie goes to other experts than in float64: a difference of the model's, which no bound covers.
    return not (family == "qwen3_moe" and fields.get("dtype") == "bfloat16")
