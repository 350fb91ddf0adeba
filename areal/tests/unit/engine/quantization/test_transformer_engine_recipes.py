"""Transformer Engine's recipes on the Megatron engine: what Megatron-Core is told, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Qwen3Config

from areal.api import FinetuneSpec, LoRAConfig, MegatronConfig, ParallelDims, TrainEngineConfig
from areal.engine.registry import create_engine
from areal.tests.grid.models import model_dir

pytest.importorskip("megatron.core")

from areal.engine.megatron.model import float8
from areal.engine.megatron.model.config import check_layout, transformer_config

MODEL = Qwen3Config(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def config(recipe: Any, backend: str = "megatron:d1", **options: Any) -> TrainEngineConfig:
    return TrainEngineConfig(path="x", backend=backend, megatron=MegatronConfig(fp8_recipe=recipe), **options)


def on_a_gpu(capability: tuple[int, int]) -> Any:
    return (
        mock.patch.object(float8, "has_transformer_engine", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    )


@pytest.mark.parametrize(
    ("recipe", "form", "rows"),
    [("tensorwise", "hybrid", 16), ("delayed", "hybrid", 16), ("blockwise", "e4m3", 16), ("mxfp8", "e4m3", 32)],
)
def test_megatron_core_is_told_the_recipe(recipe: str, form: str, rows: int) -> None:
    options = config(recipe)
    dims = ParallelDims.parse(options.backend)
    here, there = on_a_gpu((10, 0))
    with here, there:
        check_layout(MODEL, dims, options)
    fields = transformer_config(MODEL, dims, options)
    assert (fields.fp8, fields.fp8_recipe, fields.fp8_param) == (form, recipe, False)
    assert float8.rows_at_once(options) == rows
    # Rows of experts are filled up; Megatron-Core's own check of dense models refuses nothing here.
    assert float8.float8_fields(options, experts=True)["moe_router_padding_for_quantization"]
    assert transformer_config(MODEL, dims, config(None)).fp8 is None


def test_what_cannot_multiply_is_refused() -> None:
    dims = ParallelDims.parse("megatron:t4")
    with pytest.raises(ValueError, match=r"fp8_recipe = 'delayed' needs a GPU and Transformer Engine: pip install"):
        check_layout(MODEL, ParallelDims.parse("megatron:d1"), config("delayed"))
    here, there = on_a_gpu((9, 0))
    with here, there:
        with pytest.raises(ValueError, match=r"'mxfp8' needs compute capability 10.0, and this GPU has 9.0"):
            check_layout(MODEL, ParallelDims.parse("megatron:d1"), config("mxfp8"))
        narrow = Qwen3Config(**{**MODEL.to_dict(), "intermediate_size": 96, "num_key_value_heads": 4})
        with pytest.raises(
            ValueError, match=r"a rank has 24 of intermediate_size, which 16 does not divide; choose a sm"
        ):
            check_layout(narrow, dims, config("blockwise", "megatron:t4"))
    with pytest.raises(ValueError, match=r"megatron.fp8_recipe = 'delayed' with dtype = 'float32'"):
        config("delayed", dtype="float32")
    with pytest.raises(ValueError, match=r"megatron.fp8_recipe = 'delayed' with lora"):
        config("delayed", lora=LoRAConfig(rank=2))


@pytest.mark.world(1)
def test_engine_on_a_cpu_refuses_before_it_allocates() -> None:
    options = TrainEngineConfig(
        path=model_dir("qwen3"), backend="megatron:d1", megatron=MegatronConfig(fp8_recipe="tensorwise")
    )
    with pytest.raises(ValueError, match=r"megatron.fp8_recipe = 'tensorwise' needs a GPU"):
        create_engine(options).initialize(FinetuneSpec(total_train_steps=1))
