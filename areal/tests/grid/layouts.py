"""Axes of the grid: layouts of each engine, options of its configuration, dtypes and their tolerances.

A new engine joins by its entry point, with the layouts ``d1`` and ``d2``, or with those of its entry in :data:`LAYOUTS`.
A new family is added in :mod:`areal.tests.grid.models`, an objective in ``losses``, a batch or a split in ``cases``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.api import LoRAConfig, OptimizerConfig, ParallelDims, TrainEngineConfig
from areal.engine.registry import engine_names
from areal.tests.grid.cases import CASES, CUTS, EMPTY_RANKS, Case
from areal.tests.grid.losses import OBJECTIVES, Objective
from areal.tests.grid.models import FAMILIES, adapter_dir, model_dir


@dataclass(frozen=True)
class Layout:
    """One layout of one engine.

    Attributes:
        backend: layout string such as ``fsdp:d2c2``.
        how: name of a variant if a backend has several, such as ``ulysses``.
        options: fields of the engine's configuration.
        refuses: families that the layout does not support.
        changes: fields of the model's configuration that the layout needs.
        without: names of options that the layout does not support.
    """

    backend: str
    how: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Backend and variant."""
        return f"{self.backend}-{self.how}" if self.how else self.backend

    @property
    def family(self) -> str:
        """Default family of tests that use one family only."""
        return next(family for family in ("qwen3", "qwen3_moe") if family not in self.refuses)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return ParallelDims.parse(self.backend).world_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return ParallelDims.parse(self.backend).dp

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return ParallelDims.parse(self.backend).backend


_NOT_MEGATRON = ("gemma3_text",)
_EXPERTS = ("qwen3_moe", "deepseek_v3")
_DENSE = tuple(family for family in FAMILIES if family not in _EXPERTS)
_SPLIT = (*_NOT_MEGATRON, "smollm")
"""Families that tensor parallelism of Megatron does not support: smollm has 9 heads."""
_NO_PLAN = ("smollm", *_EXPERTS)
"""Families that tensor parallelism of the FSDP engine does not support."""


def _context_parallel(letters: str) -> tuple[Layout, Layout]:
    return (
        # The 9 heads of smollm are not divisible by any degree used here.
        Layout(f"fsdp:{letters}", "ulysses", {"fsdp": {"context_parallel": "ulysses"}}, refuses=("smollm",)),
        Layout(f"fsdp:{letters}", "gather_kv", {"fsdp": {"context_parallel": "gather_kv"}}),
    )


_NOT_JAX = ("gemma3_text", "deepseek_v3")


_UNEVEN = {"vocab_size": 115, "num_key_value_heads": 1}
"""Numbers that do not divide by two ranks. Most other tests of tensor parallelism have numbers that do."""
_FOUR_LAYERS = {"num_hidden_layers": 4}


def _pipeline(letters: str, schedule: str = "", *, refuses: tuple[str, ...] = ()) -> Layout:
    options = {"fsdp": {"pipeline_schedule": schedule}} if schedule else {}
    deep = "v" in letters or "p4" in letters
    apart = ("recompute", "selective", "lora", "compile") if "ZeroBubble" in schedule else ()
    return Layout(
        f"fsdp:{letters}",
        schedule,
        options,
        (*refuses, *(("gemma3_text",) if deep else ())),
        _FOUR_LAYERS if deep else {},
        ("sync_each", *apart),
    )


def _megatron(letters: str, how: str = "", *, refuses: tuple[str, ...] = _NOT_MEGATRON, **options: Any) -> Layout:
    return Layout(f"megatron:{letters}", how, {"megatron": options}, refuses)


LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "fsdp": (
        Layout("fsdp:d1"),
        Layout("fsdp:d2"),
        Layout("fsdp:r2"),
        *_context_parallel("c2"),
        Layout("fsdp:t2", refuses=_NO_PLAN, changes=_UNEVEN),
        _pipeline("p2"),
        _pipeline("p2", "GPipe"),
        _pipeline("p2v2", "Interleaved1F1B"),
        _pipeline("p2v2", "InterleavedZeroBubble"),
        _pipeline("p2v2", "ZBVZeroBubble"),
        Layout("fsdp:d4"),
        Layout("fsdp:r2d2"),
        *_context_parallel("d2c2"),
        *_context_parallel("c4"),
        Layout("fsdp:r2c2"),
        Layout("fsdp:d2t2", refuses=_NO_PLAN, changes=_UNEVEN),
        Layout("fsdp:c2t2", "ulysses", {"fsdp": {"context_parallel": "ulysses"}}, refuses=_NO_PLAN, changes=_UNEVEN),
        Layout("fsdp:c2t2", "gather_kv", {"fsdp": {"context_parallel": "gather_kv"}}, refuses=_NO_PLAN),
        Layout("fsdp:e2", refuses=_DENSE),
        Layout("fsdp:d2e2", refuses=_DENSE),
        Layout("fsdp:r2e2", refuses=_DENSE),
        Layout("fsdp:c2e2", refuses=_DENSE),
        _pipeline("e2p2", refuses=_DENSE),
        _pipeline("d2p2"),
        _pipeline("c2p2"),
        _pipeline("p2t2", refuses=_NO_PLAN),
        _pipeline("p4"),
    ),
    "megatron": (
        _megatron("d1"),
        _megatron("d2"),
        _megatron("t2", refuses=_SPLIT),
        _megatron("t2", "no_sp", refuses=(*_SPLIT, *_EXPERTS), sequence_parallel=False),
        _megatron("p2"),
        _megatron("c2", "ulysses", refuses=_SPLIT, context_parallel="ulysses"),
        _megatron("c2", "gather_kv", context_parallel="gather_kv"),
        _megatron("e2", refuses=_DENSE),
        Layout("megatron:p2v2", refuses=_NOT_MEGATRON, changes=_FOUR_LAYERS),
        _megatron("d2p2"),
        _megatron("t2p2", refuses=_SPLIT),
        _megatron("c2p2"),
        _megatron("c4", context_parallel="gather_kv"),
        _megatron("e2t2", refuses=_DENSE),
        _megatron("(attn:d1t2|ffn:d1e2)", refuses=_DENSE),
    ),
    "jax": (
        Layout("jax:d1", refuses=_NOT_JAX),
        Layout("jax:d2", refuses=_NOT_JAX),
        Layout("jax:t2", refuses=_NOT_JAX),
        Layout("jax:c2", refuses=_NOT_JAX),
        Layout("jax:d2t2", refuses=_NOT_JAX),
        Layout("jax:r2c2", refuses=_NOT_JAX),
        Layout("jax:e2", refuses=(*_DENSE, "deepseek_v3")),
        Layout("jax:(attn:d1t2|ffn:d1e2)", refuses=(*_DENSE, "deepseek_v3")),
    ),
}

LORA = LoRAConfig(rank=3, alpha=4.5)
"""Adapters on every linear layer. The cells load one that is drawn by peft, has no zeros, and includes the output head."""

OPTIONS: dict[str, dict[str, Mapping[str, Any]]] = {
    "fsdp": {
        "plain": {},
        "recompute": {"activation_checkpointing": "full"},
        "selective": {"activation_checkpointing": "selective", "fsdp": {"checkpointed_share": 0.5}},
        "sync_each": {"grad_sync": "micro_batch"},
        "keep_gathered": {"fsdp": {"reshard_after_forward": False}},
        "host": {"fsdp": {"cpu_offload": True}},
        "lora": {"lora": LORA, "activation_checkpointing": "full"},
        # Without generated kernels, and so without a C++ compiler: the results of the graphs are compared. Every second layer recomputes.
        "compile": {
            "activation_checkpointing": "selective",
            "fsdp": {"compile": True, "compile_backend": "aot_eager", "checkpointed_share": 0.5},
        },
    },
    "megatron": {
        "plain": {},
        "recompute": {"activation_checkpointing": "full"},
        "overlap": {"megatron": {"overlap_param_gather": True, "bucket_size": 1000}},
        "plain_optimizer": {"megatron": {"distributed_optimizer": False, "overlap_grad_reduce": False}},
        "lora": {"lora": LORA, "activation_checkpointing": "full"},
    },
    "jax": {
        "plain": {},
        "recompute": {"activation_checkpointing": "full"},
        "lora": {"lora": LORA, "activation_checkpointing": "full"},
    },
}

TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 8e-2}
"""Largest error of losses, metrics, outputs and gradient norms against the float64 reference, by compute dtype."""

GRADIENT_TOLERANCES = {**TOLERANCES, "bfloat16": 4e-1}
"""Largest error of a gradient's entries, relative to its largest.

In bf16 some of the models' 32 columns lose most digits: one process has errors up to 0.3, and each layout and CPU rounds otherwise.
"""


def all_layouts() -> list[Layout]:
    """Return the layouts of every installed engine."""
    return [
        layout for name in engine_names() for layout in LAYOUTS.get(name, (Layout(f"{name}:d1"), Layout(f"{name}:d2")))
    ]


def all_options(engine: str) -> dict[str, Mapping[str, Any]]:
    """Options of an engine's configuration by name."""
    return OPTIONS.get(engine, {"plain": {}})


@dataclass(frozen=True)
class Cell:
    """One point of the grid: the engine's configuration and its input."""

    layout: Layout
    family: str = "qwen3"
    objective_name: str = "nll"
    case_name: str = "ragged"
    cut: str = "whole"
    options: str = "plain"
    dtype: str = "float64"
    empty_rank: str = "none"

    def __str__(self) -> str:
        empty = [] if self.empty_rank == "none" else [f"empty_{self.empty_rank}"]
        fields = [self.family, self.objective_name, self.case_name, self.cut, self.options, self.dtype, *empty]
        return "-".join([self.layout.name, *fields])

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
        """Largest error that passes, except for gradients."""
        return TOLERANCES[self.dtype]

    @property
    def gradient_tolerance(self) -> float:
        """Largest error of gradients that passes."""
        return GRADIENT_TOLERANCES[self.dtype]

    @property
    def path(self) -> str:
        """The model's directory."""
        value_head = {"value_head": True} if self.objective.value_head else {}
        return model_dir(self.family, **value_head, **self.layout.changes)

    @property
    def adapter(self) -> str | None:
        """Directory of the adapter that is trained instead of the model."""
        return adapter_dir(self.path, LORA, head=True) if self.options == "lora" else None

    def config(self, optimizer: OptimizerConfig) -> TrainEngineConfig:
        """Return the engine's configuration."""
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
        if (
            self.dtype == "float64" or optimizer.type == "sgd"
        ):  # neither has a distributed optimizer, whose gather could overlap
            fields.get("megatron", {}).pop("overlap_param_gather", None)
        return TrainEngineConfig(**fields)


FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(all_layouts()),
    "family": tuple(FAMILIES),
    "objective_name": tuple(OBJECTIVES),
    "case_name": tuple(CASES),
    "cut": tuple(CUTS),
    "options": tuple(sorted({name for engine in engine_names() for name in all_options(engine)})),
    "dtype": tuple(TOLERANCES),
    "empty_rank": EMPTY_RANKS,
}
"""The fields of a cell and their values."""

OFTEN = {"float64": 8, "none": 16}
"""Values that most cells have: the dtype in which errors show, and no empty rank."""

OFTEN_IN_JAX = ("jax:d2", "jax:t2")
"""Layouts of two ranks with more cases than others of JAX, which compiles programs for each layout and case."""


def fits(fields: Mapping[str, Any]) -> bool:
    """Return True if a cell with these fields is possible. Missing fields are undecided."""
    layout = fields.get("layout")
    return any(_takes(one, fields) for one in ([layout] if layout is not None else FACTORS["layout"]))


def _takes(layout: Layout, fields: Mapping[str, Any]) -> bool:
    family, options = fields.get("family"), fields.get("options")
    if family in layout.refuses or options in layout.without:
        return False
    # In float64 only: an error of an empty rank is not one of rounding.
    if fields.get("empty_rank", "none") != "none" and (
        layout.dp_size == 1 or fields.get("dtype", "float64") != "float64"
    ):
        return False
    if options is not None and options not in all_options(layout.engine):
        return False
    objective = fields.get("objective_name")
    if options == "lora" and objective is not None and OBJECTIVES[objective].value_head:
        return False
    # In bf16 a token near a tie is routed differently than in float64: a property of the model without any error bound.
    only_experts = set(FAMILIES) - set(layout.refuses) <= set(_EXPERTS)
    return not ((family in _EXPERTS or only_experts) and fields.get("dtype") == "bfloat16")
