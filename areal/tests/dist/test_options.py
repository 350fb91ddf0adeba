"""Every option of every engine has an effect that can be observed, or is refused when the engine is created."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api import ParallelDims, TrainEngine, TrainEngineConfig
from areal.tests.dist.engine_views import (
    adapters,
    attention,
    buckets,
    column,
    compiled,
    cut,
    depth,
    files,
    images,
    kept_logits,
    limits,
    numbers,
    optimizers,
    recomputed,
    schedule,
    sharding,
    shared,
    splits,
    switches,
    terms,
    trains,
    weights,
)
from areal.tests.dist.option_rows import differ, naming_the_declaration, no_effect, rows_to_edit
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import NEEDS_JAX, family_dir, started
from areal.tests.mutants.finding import TESTS, collect_files, find_test

ENGINES = ("fsdp", "megatron", "jax")

# ---- the table


@dataclass(frozen=True)
class Option:
    """A value other than the default, and its effect.

    Attributes:
        value: other than the default. ``"<folder>"`` is replaced by an empty directory.
        see: what differs in an engine with the option; or the test of several ranks that shows it.
        needs: options that both engines have. layout: of both.
    """

    value: Any
    see: Callable[[TrainEngine], list[Any]] | str
    needs: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "d1"


HALF = {"dtype": "bfloat16"}
SGD = {"optimizer.type": "sgd"}
MUON = {"optimizer.type": "muon"}
DEEP = {"path": lambda: model_dir("qwen3", num_hidden_layers=4)}
EXPERTS = {"path": lambda: family_dir("qwen3_moe")}
LORA = {"lora.rank": 3}
FLOAT8 = "unit/engine/quantization/test_float8_options.py::test_{}"
INT4 = {"fsdp.quantization.format": "int4", "fsdp.quantization.group_size": 16}

OPTIONS: dict[str, Option] = {
    "path": Option(lambda: model_dir("qwen3", num_hidden_layers=1), weights),
    "backend": Option("d2", "dist/step/test_steps.py::*fsdp:d2*"),
    "dtype": Option("bfloat16", numbers),
    "master_dtype": Option("bfloat16", weights, HALF),
    "grad_reduce_dtype": Option("bfloat16", numbers, HALF),
    "init_from_scratch": Option(True, weights),
    "value_head": Option(True, weights),
    "temperature": Option(0.5, numbers),
    # On a CPU, sums and gradients of the head are float32 without it.
    "fp32_head": Option(True, "unit/logprobs/test_head_passes.py::test_16_bit_products_give_the_gradients*"),
    "kept_logits_mb": Option(7, kept_logits),
    "memory_limit_mb": Option(100, "dist/faults/test_memory_limit.py::test_pass_that_does_not_fit_is_refused*"),
    "mb_spec.max_tokens_per_mb": Option(60, cut),
    "mb_spec.n_mbs": Option(6, cut),
    "mb_spec.samples_per_mb": Option(2, cut, {"mb_spec.max_tokens_per_mb": None}),
    "mb_spec.granularity": Option(3, cut, {"mb_spec.max_tokens_per_mb": 60}),
    "mb_spec.overlong": Option("drop", cut, {"mb_spec.max_tokens_per_mb": 30}),
    "mb_spec.equal_batches": Option(
        "allow", "dist/faults/test_silent_mistakes.py::test_one_batch_on_all_data_parallel_ranks_may_be_allowed*"
    ),
    "mb_spec.share_prefixes": Option(True, shared),
    "mb_spec.per_sequence": Option(("extra",), column),
    "mb_spec.payloads": Option(("pixels",), images),
    "optimizer": Option(None, trains),
    "optimizer.type": Option("sgd", numbers),
    "optimizer.lr": Option(0.02, numbers),
    "optimizer.weight_decay": Option(0.5, numbers),
    "optimizer.beta1": Option(0.5, numbers),
    "optimizer.beta2": Option(0.5, numbers),
    "optimizer.eps": Option(0.1, numbers),
    "optimizer.momentum": Option(0.9, numbers, SGD),
    "optimizer.muon.momentum": Option(0.5, numbers, MUON),
    "optimizer.muon.nesterov": Option(False, numbers, MUON),
    "optimizer.muon.steps": Option(2, numbers, MUON),
    "optimizer.muon.dtype": Option("float32", numbers, MUON),
    "optimizer.muon.scale": Option("original", numbers, MUON),
    "optimizer.gradient_clipping": Option(0.01, numbers, SGD),
    "optimizer.lr_scheduler": Option("linear", numbers),
    "optimizer.warmup_steps": Option(2, numbers),
    "optimizer.min_lr_ratio": Option(0.5, numbers, {"optimizer.lr_scheduler": "cosine"}),
    "optimizer.decay_ratio": Option(0.9, numbers, {"optimizer.lr_scheduler": "wsd"}),
    "activation_checkpointing": Option("full", recomputed),
    "offload_dir": Option("<folder>", files),
    "control_timeout": Option(3.0, limits, layout="d2"),
    "collective_timeout": Option(3.0, limits, layout="d2"),
    "heartbeat_timeout": Option(3.0, limits, layout="d2"),
    "grad_sync": Option(
        "micro_batch", "dist/step/test_engine.py::test_gradients_are_reduced_per_call_or_per_micro_batch*"
    ),
    "deterministic": Option(True, switches),
    "seed": Option(1, weights, {"init_from_scratch": True}),
    "lora": Option({}, adapters),
    "lora.rank": Option(2, adapters, LORA),
    "lora.alpha": Option(5.0, numbers, LORA),
    "lora.target_modules": Option(("q_proj",), adapters, LORA),
    "lora.layer_kinds": Option(("mlp", "head"), adapters, LORA),
    "lora.rslora": Option(True, numbers, LORA),
    "moe.aux_loss": Option(0.1, terms, EXPERTS),
    "moe.z_loss": Option(0.1, terms, EXPERTS),
    "moe.statistics": Option(True, terms, EXPERTS),
    "fsdp.reshard_after_forward": Option(False, sharding),
    "fsdp.pipeline_schedule": Option("GPipe", schedule, layout="p2"),
    "fsdp.pipeline_layers": Option((1, 3), depth, DEEP, layout="p2"),
    "fsdp.cpu_offload": Option(True, sharding),
    "fsdp.context_parallel": Option("gather_kv", splits, layout="c2"),
    "fsdp.checkpointed_share": Option(0.5, recomputed, {"activation_checkpointing": "full"}),
    "fsdp.activation_offload": Option(True, terms),
    "fsdp.optimizer_state_dtype": Option("bfloat16", optimizers),
    "fsdp.attention": Option("rows", attention),
    "fsdp.text_only": Option(
        True, "dist/faults/test_silent_mistakes.py::test_model_that_takes_images_trains_on_text_alone_if_asked*"
    ),
    "fsdp.freeze_vision": Option(True, "dist/parallel/test_images.py::test_layouts_compute_the_same*d1-frozen*"),
    "fsdp.layer_kernels": Option("liger", "unit/engine/layers/test_liger.py::test_engine_trains_with_liger_if_asked*"),
    "fsdp.quantization": Option({}, numbers),
    "fsdp.quantization.format": Option("fp8_blocks", numbers, {"fsdp.quantization": {}}),
    "fsdp.quantization.group_size": Option(8, numbers, INT4),
    "fsdp.quantization.exclude": Option(("up_proj",), numbers, INT4),
    "fsdp.float8": Option({"emulate": True}, FLOAT8.format("engine_multiplies_by_the_products_of_a_recipe*")),
    "fsdp.float8.recipe": Option("mxfp8", FLOAT8.format("engine_multiplies_by_the_products_of_a_recipe*")),
    "fsdp.float8.experts": Option(
        True, FLOAT8.format("a_module_without_grouped_products_is_named"), {"fsdp.float8.recipe": "mxfp8"}
    ),
    "fsdp.float8.emulate": Option(True, FLOAT8.format("hardware_sizes_and_a_missing_package_are_named")),
    "fsdp.float8.exclude": Option(("up_proj",), FLOAT8.format("routers_and_excluded_layers_are_left_alone")),
    "fsdp.batch_invariant": Option(True, attention),
    "fsdp.compile": Option(True, compiled),
    "fsdp.compile_backend": Option(
        "aot_eager",
        "dist/step/test_compile.py::test_compiled_graphs_are_reused_for_many_lengths*plain*",
        {"fsdp.compile": True},
    ),
    "megatron.sequence_parallel": Option(False, splits, layout="t2"),
    "megatron.context_parallel": Option("gather_kv", splits, layout="c2"),
    "megatron.first_stage_layers": Option(1, depth, DEEP, layout="p2"),
    "megatron.last_stage_layers": Option(1, depth, DEEP, layout="p2"),
    "megatron.distributed_optimizer": Option(False, optimizers),
    "megatron.overlap_grad_reduce": Option(
        False, "dist/megatron/test_megatron.py::test_reduction_starts_in_the_backward_unless_it_is_off*"
    ),
    "megatron.overlap_param_gather": Option(
        True, "dist/megatron/test_megatron_weights.py::test_pending_gathered_weights_are_streamed*"
    ),
    "megatron.bucket_size": Option(1000, buckets),
    "megatron.optimizer_state_dtype": Option("bfloat16", optimizers),
    "megatron.fp8_recipe": Option(
        "delayed", "unit/engine/quantization/test_transformer_engine_recipes.py::test_megatron_core_is_told_the_recipe*"
    ),
    "jax.coordinator": Option(
        "localhost:1234", "dist/jax/test_world.py::test_coordinator_listens_where_the_configuration_says"
    ),
    "jax.devices_per_process": Option(4, "dist/jax/test_devices.py::test_budget_is_that_of_a_device"),
    "jax.attention_kernel": Option(
        False, "dist/jax/test_jax.py::test_kernel_computes_packed_sequences_and_blocks_shared_prefixes[w1]"
    ),
    "jax.compilation_cache": Option("<folder>", "dist/jax/test_programs.py::test_second_start_compiles_nothing"),
}

REFUSED = {
    ("megatron", "grad_sync"),
    ("megatron", "master_dtype"),
    ("megatron", "megatron.optimizer_state_dtype"),  # without Transformer Engine on a GPU
    ("jax", "grad_sync"),
    ("jax", "memory_limit_mb"),  # its peak is that of the compiler
    *(("jax", option) for option in OPTIONS if option.startswith("moe.")),
    *(
        (engine, option)
        for engine in ENGINES
        for option in OPTIONS
        if option.partition(".")[0] in {*ENGINES} - {engine}
    ),
}
"""Options that an engine refuses. It honours all others."""

BASE = {
    "path": lambda: family_dir("qwen3"),
    "dtype": "float32",
    "mb_spec.max_tokens_per_mb": 40,
    "optimizer.lr": 0.01,
    "optimizer.gradient_clipping": None,
}


def fields_of(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Nested fields of dotted names. A group that is ``None`` or a mapping replaces its fields."""
    fields: dict[str, Any] = {}
    for name, given in options.items():
        *groups, last = name.split(".")
        here = fields
        for group in groups:
            here = here.setdefault(group, {})
        # A copy: later names may add to a group.
        value = given() if callable(given) else copy.deepcopy(given)
        here[last] = str(folder) if value == "<folder>" else value
    return fields


def observed(engine: str, name: str, options: Mapping[str, Any], folder: Path) -> list[Any]:
    option = OPTIONS[name]
    fields = fields_of(options, folder)
    try:
        with started(f"{engine}:{option.layout}", total_steps=4, **fields) as made:
            return option.see(made)  # type: ignore[operator]
    finally:
        torch.use_deterministic_algorithms(False)


def cases(*, refused: bool) -> list[Any]:
    return [
        pytest.param(
            engine,
            name,
            id=f"{engine}-{name}",
            marks=[
                pytest.mark.world(ParallelDims.parse(f"x:{option.layout}").world_size),
                *([NEEDS_JAX] if engine == "jax" else []),
                # Each of them compiles, and reads the same field.,
            ],
        )
        for engine in ENGINES
        for name, option in OPTIONS.items()
        if ((engine, name) in REFUSED) == refused and (refused or not isinstance(option.see, str))
    ]


def test_every_option_is_in_the_table() -> None:
    assert rows_to_edit(OPTIONS, TrainEngineConfig) == []


def test_tests_that_show_an_effect_exist(request: pytest.FixtureRequest) -> None:
    tests = [option.see for option in OPTIONS.values() if isinstance(option.see, str)]
    items = collect_files(request, {str(TESTS / test.split("::")[0]) for test in tests})
    for test in tests:
        find_test(test, items)


@pytest.mark.parametrize(("engine", "name"), cases(refused=False))
def test_an_option_has_an_effect(engine: str, name: str, tmp_path: Path) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    option = OPTIONS[name]
    without = {**BASE, **option.needs}
    changed = {**{key: value for key, value in without.items() if not key.startswith(f"{name}.")}, name: option.value}
    one = observed(engine, name, without, tmp_path)
    with naming_the_declaration(engine, name):
        other = observed(engine, name, changed, tmp_path)
    assert differ(one, other), no_effect(engine, name)


@pytest.mark.parametrize(("engine", "name"), cases(refused=True))
def test_an_option_that_an_engine_does_not_support_is_refused(engine: str, name: str, tmp_path: Path) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    option = OPTIONS[name]
    sections = ("dtype", name.partition(".")[0])
    needs = {key: value for key, value in option.needs.items() if key.partition(".")[0] in sections}
    # The group of an option of another engine's section is named with all that it has.
    section, _, inner = name.partition(".")
    named = f"{section}.{inner.partition('.')[0]}" if section in ENGINES else name
    with pytest.raises(ValueError, match=f"{re.escape(named)} = "):
        observed(engine, name, {**BASE, **needs, name: option.value}, tmp_path)
