"""Saving and loading: restored state, other layouts, and faults."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from areal.api import OptimizerConfig, SaveLoadMeta
from areal.engine.checkpoint.atomic_dir import is_complete, verify
from areal.tests.dist.checkpoint.checkpoints import Counter, flip, step, unharmed
from areal.tests.dist.checkpoint.stages import at_stages
from areal.tests.grid.models import model_dir
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import (
    OPTIMIZER,
    checkpointer_of,
    global_batch,
    gpt2_dir,
    layout,
    layouts,
    local_batch,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world

SGD = OptimizerConfig(type="sgd", lr=0.1, momentum=0.9)


def all_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# ---- the Hugging Face format


HF_CASES = [
    *(
        layout(backend, family)
        for family in ("qwen3", "qwen3_moe", "qwen3_tied")
        for backend in ("fsdp:d1", "fsdp:d2", "fsdp:p2")
    ),
    *(layout(backend, "qwen3_tied") for backend in ("fsdp:c2", "megatron:p2")),
    layout("fsdp:d2c2", "qwen3_moe"),
    layout("jax:d2", "qwen3"),
    layout("jax:t2", "qwen3_tied"),
]


@pytest.mark.parametrize(("backend", "family"), HF_CASES)
def test_hf_checkpoint_loads_in_transformers(backend: str, family: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with started(backend, path=model_dir(family), optimizer=SGD) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(path))
        trained = weights_of(engine)
        samples = local_batch(engine, global_batch())
        outputs = engine.forward_batch(samples, outputs=("logits",))
    plain, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert plain.dtype == torch.float32
    assert not any(report.values())
    for sample, logits in zip(samples, outputs, strict=True):
        expected = plain(sample["input_ids"][None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    with started(backend, path=str(path)) as engine:
        assert same_bits(weights_of(engine), trained)
    with started(backend, path=model_dir(family)) as engine:
        engine.load(SaveLoadMeta(path))
        assert same_bits(weights_of(engine), trained)


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("fsdp:d1", "fsdp:d2", "jax:d2")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_hf_checkpoint_in_several_files_with_tokenizer(backend: str, asynchronous: bool, tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "saved"
    with started(backend, value_head=True) as engine:
        if world().rank == 0:
            AutoConfig.from_pretrained(engine.config.path).save_pretrained(source)
            (source / "tokenizer_config.json").write_text("{}")
            (source / "chat_template.jinja").write_text("{{ messages }}")
            (source / "optimizer.pt").write_text("not part of a model")
        dist.barrier()
        checkpointer = checkpointer_of(engine, str(source), max_file_bytes=12_000)
        checkpointer.save(SaveLoadMeta(path, asynchronous=asynchronous))
        checkpointer.wait()
        expected = weights_of(engine)
    actual = {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
    assert same_bits(actual, expected)
    files = all_files(path)
    assert {"config.json", "tokenizer_config.json", "chat_template.jinja", "value_head.safetensors"} < set(files)
    assert "optimizer.pt" not in files
    assert sum(name.startswith("model-0000") for name in files) > 5
    assert {file.name for file in verify(path).files} == set(files) - {"manifest.json"}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected) - {"value_head.weight"}
    AutoModelForCausalLM.from_pretrained(path)


# ---- resume


@pytest.mark.parametrize("backend", layouts(1, 2, 4, engine="fsdp", but=("fsdp:p2",)))  # for a model with dropout
@pytest.mark.parametrize("optimizer", [OPTIMIZER, SGD], ids=["adamw", "sgd"])
def test_dcp_checkpoint_resumes_bitwise(backend: str, optimizer: OptimizerConfig, tmp_path: Path) -> None:
    """Compare a run with dropout, a schedule and a value head that resumes after two steps with one that never stopped."""
    options: dict[str, Any] = {"path": gpt2_dir(resid_pdrop=0.2), "optimizer": optimizer, "value_head": True}
    with started(backend, **options) as engine:
        step(engine, 1)
        step(engine, 2)
        engine.set_version(7)
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp", stateful={"data": Counter(3)}))
        step(engine, 3)
        expected, lr = weights_of(engine), engine.lr
    with started(backend, **options) as engine:
        data = Counter()
        engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp", stateful={"data": data}))
        assert engine.version == 7
        assert data.state["count"] == 3
        assert data.state["order"].tolist() == [0, 1, 2]
        step(engine, 3)
        assert engine.lr == lr
        assert same_bits(weights_of(engine), expected)


def go_on(backend: str, read: str | None, write: str, seed: int) -> None:
    """Take one step of a run: load a checkpoint and save the next."""
    with started(backend, path=model_dir("qwen3_moe")) as engine:
        if read is not None:
            engine.load(SaveLoadMeta(read, weight_format="dcp"))
        step(engine, seed)
        engine.save(SaveLoadMeta(write, weight_format="dcp"))
        engine.save(SaveLoadMeta(f"{write}-hf"))


@needs_own_world
def test_dcp_checkpoint_resumes_in_other_layouts(tmp_path: Path) -> None:
    """Take one step in each of d4, d2, c2 and d1, compared with four steps in d1; then convert there and back without a step."""
    for run, chain in {"moved": ["d4", "d2", "c2", "d1"], "stayed": ["d1"] * 4}.items():
        read = None
        for i, letters in enumerate(chain):
            write = str(tmp_path / f"{run}{i}")
            succeed(int(letters[1]), go_on, f"fsdp:{letters}", read, write, i)
            read = write
    moved, stayed = (load_file(tmp_path / f"{run}3-hf" / "model.safetensors") for run in ("moved", "stayed"))
    start = load_file(Path(model_dir("qwen3_moe")) / "model.safetensors")
    assert moved.keys() == stayed.keys()
    for name in moved:
        change = (stayed[name] - start[name]).abs().max()
        assert (moved[name] - stayed[name]).abs().max() < 2e-3 * change + 1e-6, name


@pytest.mark.world(4)
@pytest.mark.parametrize("other", ["fsdp:r2d2", "fsdp:c4"])
def test_dcp_checkpoint_is_bitwise_equal_in_another_layout(other: str, tmp_path: Path) -> None:
    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp")
    with started("fsdp:d4") as engine:
        step(engine, 1)
        engine.save(meta)
        expected = weights_of(engine)
    with started(other) as engine:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        engine.load(meta)
        assert same_bits(weights_of(engine), expected)
        assert torch.equal(torch.get_rng_state(), before)  # state of another layout: not loaded
        moments = engine._components.optimizer.inner.state_dict()["state"]
        assert all(entry["step"] == 1 and entry["exp_avg"].full_tensor().any() for entry in moments.values())


@pytest.mark.world(2)
def test_dcp_checkpoint_without_optimizer(tmp_path: Path) -> None:
    light = SaveLoadMeta(tmp_path / "light", weight_format="dcp", with_optim=False)
    full = SaveLoadMeta(tmp_path / "full", weight_format="dcp")
    with started("fsdp:d2") as engine:
        step(engine, 1)
        engine.save(light)
        engine.save(full)
        expected = weights_of(engine)
        with pytest.raises(ValueError, match=r"light was saved with no optimizer state.*with_optim=False"):
            engine.load(SaveLoadMeta(tmp_path / "light", weight_format="dcp"))
        step(engine, 2)
        engine.load(light)
        assert same_bits(weights_of(engine), expected)
    with started("fsdp:d2", optimizer=None) as engine:
        engine.load(full)
        assert same_bits(weights_of(engine), expected)
    with started("fsdp:d2", optimizer=SGD) as engine, pytest.raises(ValueError, match=r"optimizer AdamW.*has SGD"):
        engine.load(full)


# ---- asynchronous saves


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("fsdp:d1", "fsdp:d2", "jax:d1", "jax:d2")])
@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_async_save_contains_state_at_the_call(weight_format: Any, backend: str, tmp_path: Path) -> None:
    meta = SaveLoadMeta(tmp_path / "saved", weight_format=weight_format, asynchronous=True)
    with started(backend) as engine:
        step(engine, 1)
        expected = weights_of(engine)
        engine.save(meta)
        for seed in range(2, 5):
            step(engine, seed)
        engine.wait_for_checkpoint()
        engine.wait_for_checkpoint()
        assert is_complete(tmp_path / "saved")
        assert not same_bits(weights_of(engine), expected)
        engine.load(meta)
        assert same_bits(weights_of(engine), expected)


@pytest.mark.world(2)
def test_async_save_is_published_during_training(tmp_path: Path) -> None:
    with started("fsdp:d2") as engine:
        engine.save(SaveLoadMeta(tmp_path / "saved", weight_format="dcp", asynchronous=True))
        for seed in range(200):
            step(engine, seed)
            result = [is_complete(tmp_path / "saved")] * 2
            dist.all_gather_object(result, result[0])
            if all(result):
                return
        raise AssertionError("nobody waited for it, and it never came")


@pytest.mark.world(2)
def test_destroy_finishes_async_save(tmp_path: Path) -> None:
    with started("fsdp:d2") as engine:
        engine.save(SaveLoadMeta(tmp_path / "saved", asynchronous=True))
    assert is_complete(tmp_path / "saved")


# ---- several checkpoints, and replacement


@pytest.mark.world(2)
@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_retention_keeps_newest_and_replaces(weight_format: Any, tmp_path: Path) -> None:
    with started("fsdp:d2") as engine:
        for i in (0, 1, 2, 1):
            step(engine, i)
            engine.save(
                SaveLoadMeta(tmp_path / f"step{i}", weight_format=weight_format, keep_last=2, asynchronous=i == 2)
            )
        assert sorted(os.listdir(tmp_path)) == ["step1", "step2"]
        expected = weights_of(engine)
        step(engine, 5)
        engine.load(SaveLoadMeta(tmp_path / "step1", weight_format=weight_format))
        assert same_bits(weights_of(engine), expected)


@pytest.mark.world(1)
def test_retention_keeps_the_directory_that_the_engine_started_from(tmp_path: Path) -> None:
    """Each "hf" save copies the tokenizer from there."""
    with started("fsdp:d1") as engine:
        engine.save(SaveLoadMeta(tmp_path / "step0"))
    with started("fsdp:d1", path=str(tmp_path / "step0")) as engine:
        for i in (1, 2, 3):
            engine.save(SaveLoadMeta(tmp_path / f"step{i}", keep_last=1))
    assert sorted(os.listdir(tmp_path)) == ["step0", "step3"]


# ---- faults


DAMAGES = {
    ("dcp", "value"): (lambda path: flip(path / "__1_0.distcp"), r"__1_0\.distcp is damaged: its checksum"),
    ("dcp", "metadata"): (lambda path: flip(path / ".metadata"), r"\.metadata is damaged"),
    ("dcp", "missing"): (lambda path: (path / "state.pt").unlink(), r"state\.pt is missing"),
    ("dcp", "manifest"): (lambda path: (path / "manifest.json").unlink(), r"no complete checkpoint"),
    ("hf", "value"): (lambda path: flip(path / "model.safetensors"), r"model\.safetensors is damaged: its checksum"),
    ("hf", "missing"): (lambda path: (path / "model.safetensors").unlink(), r"model\.safetensors is missing"),
}


@pytest.mark.world(2)
@pytest.mark.parametrize(("weight_format", "damage"), [*DAMAGES])
def test_damaged_file_raises_and_loads_nothing(weight_format: Any, damage: str, tmp_path: Path) -> None:
    spoil, message = DAMAGES[weight_format, damage]
    meta = SaveLoadMeta(tmp_path / "saved", weight_format=weight_format)
    with started("fsdp:d2") as engine:
        engine.save(meta)
        step(engine, 1)
        if world().rank == 0:
            spoil(tmp_path / "saved")
        dist.barrier()
        with unharmed(engine), pytest.raises(ValueError, match=message):
            engine.load(meta)


@pytest.mark.parametrize("backend", [layout("fsdp:d2"), layout("jax:d2")])
@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_checkpoint_of_another_model_raises_and_loads_nothing(weight_format: Any, backend: str, tmp_path: Path) -> None:
    others = {
        "wider": ({"intermediate_size": 64}, r"layers\.0\.mlp\.\w+\.weight' has shape.*but the model needs"),
        "deeper": ({"num_hidden_layers": 3}, r"has '[\w.]*layers\.2\.[\w.]+'.*has not"),
        "shallower": ({"num_hidden_layers": 1}, r"no '[\w.]*layers\.1\.[\w.]+', which the model needs"),
    }
    for name, (changes, _) in others.items():
        with started(backend, path=model_dir("qwen3", **changes)) as engine:
            engine.save(SaveLoadMeta(tmp_path / name, weight_format=weight_format))
    other_format: Any = {"hf": "dcp", "dcp": "hf"}[weight_format]
    with started(backend) as engine:
        for name, (_, message) in others.items():
            with unharmed(engine), pytest.raises(ValueError, match=message):
                engine.load(SaveLoadMeta(tmp_path / name, weight_format=weight_format))
        with unharmed(engine), pytest.raises(ValueError, match=f"saved with weight_format='{weight_format}'"):
            engine.load(SaveLoadMeta(tmp_path / "wider", weight_format=other_format))
        with unharmed(engine), pytest.raises(ValueError, match="nowhere"):
            engine.load(SaveLoadMeta(tmp_path / "nowhere", weight_format=weight_format))


@pytest.mark.world(2)
def test_missing_or_unreadable_state_raises(tmp_path: Path) -> None:
    with started("fsdp:d2") as engine:
        with pytest.raises(ValueError, match=r"stateful\['data'\].*not a tensor"):
            engine.save(
                SaveLoadMeta(tmp_path / "run", weight_format="dcp", stateful={"data": Counter(state={"x": Path()})})
            )
        dist.barrier()
        assert os.listdir(tmp_path) == []
        dist.barrier()
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp", stateful={"data": Counter(1)}))
        with unharmed(engine), pytest.raises(ValueError, match=r"no state for .*'loader'.*\['data'\]"):
            engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp", stateful={"loader": Counter()}))


@pytest.mark.world(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("weight_format", "rank", "stage"), [("hf", 1, "writing"), ("hf", 0, "all written"), ("dcp", 1, "written")]
)
def test_write_error_on_one_rank_raises_on_all_ranks(
    weight_format: Any, rank: int, stage: str, asynchronous: bool, tmp_path: Path
) -> None:
    def full_disk(reached: str) -> None:
        if reached == stage and world().rank == rank:
            raise OSError(28, "No space left on device")

    def save() -> None:
        engine.save(SaveLoadMeta(tmp_path / "saved", weight_format=weight_format, asynchronous=asynchronous))
        engine.wait_for_checkpoint()

    with started("fsdp:d2") as engine:
        engine.save(SaveLoadMeta(tmp_path / "saved", weight_format=weight_format))
        expected: dict[str, Tensor] = weights_of(engine)
        step(engine, 1)
        with (
            unharmed(engine),
            at_stages(full_disk),
            pytest.raises(RuntimeError, match=rf"rank {rank}: OSError.*No space left.*nothing was saved"),
        ):
            save()
        dist.barrier()
        assert os.listdir(tmp_path) == ["saved"]
        engine.load(SaveLoadMeta(tmp_path / "saved", weight_format=weight_format))
        assert same_bits(weights_of(engine), expected)
