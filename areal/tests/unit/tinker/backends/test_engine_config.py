"""Settings of the backend: each is honoured or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api import FSDPConfig
from areal.tests.grid.models import model_dir
from areal.tests.unit.tinker.backends.conftest import Start
from areal.tinker.backends.losses.loss_table import loss_keys
from areal.tinker.backends.training.base_model import find_base_model
from areal.tinker.backends.training.engine_backend import create
from areal.tinker.backends.training.engine_config import EngineBackendConfig, RayConfig


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"colour": 3},
            r"backend_config.colour = 3: there is no such setting; known are activation_checkpointing, .*, ray, seed",
        ),
        ({"max_rnk": 3}, "EngineBackendConfig has no field 'max_rnk': did you mean 'max_rank'"),
        (
            {"ray": {"cpus": 3}},
            r"backend_config.ray.cpus = 3: there is no such setting; known are address, .*, strategy",
        ),
        (
            {"fsdp": {"colour": "rows"}},
            "backend_config.fsdp.colour = 'rows': there is no such setting; known are .*attention",
        ),
        ({"fsdp": {"atention": "rows"}}, "backend_config.fsdp.*has no field 'atention': did you mean 'attention'"),
        ({"max_rank": 0}, "backend_config.max_rank = 0: .*greater than 0"),
        ({"dtype": "float16"}, "backend_config.dtype = 'float16': .*'bfloat16', 'float32' or 'float64'"),
        ({"alpha": "x", "seed": -1}, "backend_config.alpha = 'x': .*; backend_config.seed = -1"),
    ],
)
def test_settings_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineBackendConfig.parse(config)


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        (
            "fsdp:d1",
            {"megatron": {"bucket_size": 3}},
            "megatron.*with backend = 'fsdp:d1'",
        ),
        ("fsdp:d1", {"max_tokens": 10_000}, "backend_config.max_tokens = 10000: the model has a context of 256 tokens"),
        ("fsdp:x3", {}, "x3"),
        ("nothing:d1", {}, "no engine is called 'nothing'; installed are"),
    ],
)
def test_combinations_are_refused(backend: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(model_dir("qwen3"), backend, {"dtype": "float32", **config})


def test_missing_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path = '/nowhere/model': neither a directory nor a model"):
        create("/nowhere/model", "fsdp:d1", {})


def test_settings_reach_the_engine() -> None:
    fields = {
        "dtype": "bfloat16",
        "fp32_head": True,
        "kept_logits_mb": 7,
        "activation_checkpointing": "full",
        "deterministic": True,
        "seed": 5,
        "control_timeout": 3.0,
        "collective_timeout": 4.0,
        "heartbeat_timeout": 5.0,
    }
    config = EngineBackendConfig.parse({**fields, "alpha": 8.0, "max_tokens_per_mb": 99, "fsdp": {"attention": "rows"}})
    engine = config.engine_config("model", "fsdp:d1", "float32")
    assert {name: getattr(engine, name) for name in fields} == fields
    assert (engine.master_dtype, engine.grad_reduce_dtype) == ("bfloat16", "float32")
    assert (engine.mb_spec.max_tokens_per_mb, engine.mb_spec.overlong) == (99, "alone")
    assert engine.lora is not None
    assert engine.lora.alpha == 8.0
    assert engine.fsdp == FSDPConfig(attention="rows")
    assert engine.optimizer is not None
    assert engine.optimizer.lr_scheduler == "constant"


@pytest.mark.parametrize(
    ("saved", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_dtype_is_by_default_that_of_the_model(saved: str, expected: str, tmp_path: Path) -> None:
    """As in the sampler, so that the log-probs of both agree."""
    AutoModelForCausalLM.from_pretrained(model_dir("qwen3")).to(getattr(torch, saved)).save_pretrained(tmp_path)
    base = find_base_model(str(tmp_path))
    assert base.dtype == expected
    engine = EngineBackendConfig().engine_config(str(tmp_path), "fsdp:d1", base.dtype)
    assert (engine.dtype, engine.master_dtype, engine.grad_reduce_dtype) == (expected, expected, "float32")


def test_limit_of_tokens(start: Start) -> None:
    assert start(max_tokens=100, max_rank=9).limits().max_tokens == 100


def test_processes_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank runs in this process unless the settings name Ray, whose options are those of the executor."""
    made = []
    monkeypatch.setattr(
        "areal.dispatch.ray.RayWorkers", lambda size, **options: made.append((size, options)) or "workers"
    )
    assert EngineBackendConfig().executor(1).in_driver
    assert EngineBackendConfig().executor(2) == "workers"
    options = {"resources": {"GPU": 1.0}, "hang_seconds": 9.0, "environment": {"A": "b"}}
    assert EngineBackendConfig(ray=RayConfig(**options)).executor(1) == "workers"  # type: ignore[arg-type]
    assert made == [(2, {}), (1, RayConfig(**options).model_dump())]  # type: ignore[arg-type]


def test_page_has_each_setting_and_each_loss() -> None:
    page = (Path(__file__).parents[5] / "docs" / "server-training.md").read_text()
    for name in EngineBackendConfig.model_fields:
        assert f"`{name}`" in page, name
    for name, keys in loss_keys().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{key}`" in row for key in keys["config"])
