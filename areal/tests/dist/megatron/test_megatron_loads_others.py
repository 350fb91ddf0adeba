"""Checkpoints of other engines in the Megatron engine: weights, moments and the count of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.api import SaveLoadMeta
from areal.tests.dist.checkpoint.checkpoints import DCP, step, unharmed
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import same_bits, started, weights_of


@pytest.mark.world(2)
@pytest.mark.parametrize(("letters", "family"), [("t2", "qwen3"), ("p2", "qwen3_tied"), ("d2", "qwen3")])
def test_megatron_loads_fsdp_checkpoint(letters: str, family: str, tmp_path: Path) -> None:
    with started("fsdp:d2", path=model_dir(family)) as engine:
        step(engine, 1)
        step(engine, 2)
        engine.save(SaveLoadMeta(tmp_path / "hf"))
        engine.save(SaveLoadMeta(tmp_path / "dcp", DCP))
        expected = weights_of(engine)
        step(engine, 3)
        went_on, lr = weights_of(engine), engine.lr
    with started(f"megatron:{letters}", path=model_dir(family)) as engine:
        engine.load(SaveLoadMeta(tmp_path / "hf"))
        assert same_bits(weights_of(engine), expected)
        step(engine, 5)
        # With moments, count of steps and schedule: the next step is that of the other engine.
        engine.load(SaveLoadMeta(tmp_path / "dcp", DCP))
        assert same_bits(weights_of(engine), expected)
        step(engine, 3)
        assert engine.lr == lr
        for name, weight in weights_of(engine).items():
            change = (went_on[name] - expected[name]).abs().max()
            assert (weight - went_on[name]).abs().max() < 1e-3 * change + 1e-7, name
        engine.save(SaveLoadMeta(tmp_path / "own", DCP))
    refused = pytest.raises(ValueError, match=r"by the engine 'megatron'.*weight_format='hf'")
    with started("fsdp:d2", path=model_dir(family)) as engine, unharmed(engine), refused:
        engine.load(SaveLoadMeta(tmp_path / "own", DCP))


@pytest.mark.world(2)
def test_fsdp_checkpoint_of_experts_is_refused(tmp_path: Path) -> None:
    """In memory, the FSDP engine has the experts of a layer in one tensor."""
    with started("fsdp:d2", path=model_dir("qwen3_moe")) as engine:
        engine.save(SaveLoadMeta(tmp_path / "dcp", DCP))
    with started("megatron:d2", path=model_dir("qwen3_moe")) as engine:
        refused = pytest.raises(ValueError, match=r"has no 'hf\.model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight'")
        with unharmed(engine), refused:
            engine.load(SaveLoadMeta(tmp_path / "dcp", DCP))
