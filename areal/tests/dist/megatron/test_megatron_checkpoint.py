"""Checkpoints of the Megatron engine: restored state, other layouts, and exchange with other programs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from areal.api import OptimizerConfig, SaveLoadMeta
from areal.engine.checkpoint.atomic_dir import is_complete, verify
from areal.engine.checkpoint.dcp import read_metadata, read_tensors
from areal.tests.dist.checkpoint.checkpoints import DCP, Counter, flip, step, unharmed
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import same_bits, started, weights_of
from areal.tests.harness.world import world

pytest.importorskip("megatron.core")

PLAIN = {"megatron": {"distributed_optimizer": False}}
OVERLAP = {"megatron": {"overlap_param_gather": True, "bucket_size": 1000}}
WIDE = {"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}
DEEP = {"num_hidden_layers": 4}


def model(family: str = "qwen3", **changes: Any) -> str:
    return model_dir(family, **changes)


# ---- resume in the same layout


SAME: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "d1": (1, "d1", "qwen3", {}),
    "sgd": (1, "d1", "qwen3", {"optimizer": OptimizerConfig(type="sgd", lr=0.1, momentum=0.9), **PLAIN}),
    "d2": (2, "d2", "qwen3_tied", {}),
    "d2-bf16": (2, "d2", "qwen3", {"dtype": "bfloat16"}),
    "d2-bf16-plain": (2, "d2", "qwen3", {"dtype": "bfloat16", **PLAIN}),
    "d2-float64": (2, "d2", "qwen3", WIDE),
    "t2": (2, "t2", "qwen3_tied", {}),
    "p2": (2, "p2", "qwen3_tied", {}),
    "c2": (2, "c2", "qwen3", {}),
    "e2": (2, "e2", "qwen3_moe", {}),
    "d2t2": (4, "d2t2", "qwen3", {}),
    "e2p2": (4, "e2p2", "qwen3_moe", {}),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.world(world)) for name, (world, *_) in SAME.items()]
)
def test_megatron_checkpoint_resumes_bitwise(name: str, asynchronous: bool, tmp_path: Path) -> None:
    """Compare a run with a schedule that resumes after two steps with one that never stopped."""
    _, letters, family, options = SAME[name]
    options = {"path": model(family), **options}
    with started(f"megatron:{letters}", **options) as engine:
        step(engine, 1)
        step(engine, 2)
        engine.set_version(7)
        meta = SaveLoadMeta(tmp_path / "run", DCP, asynchronous=asynchronous, stateful={"data": Counter(3)})
        engine.save(meta)
        step(engine, 3)
        engine.wait_for_checkpoint()
        expected, lr = weights_of(engine), engine.lr
        engine.load(SaveLoadMeta(tmp_path / "run", DCP))
        step(engine, 3)
        assert same_bits(weights_of(engine), expected)
    with started(f"megatron:{letters}", **options) as engine:
        data = Counter()
        engine.load(SaveLoadMeta(tmp_path / "run", DCP, stateful={"data": data}))
        assert (engine.version, data.state["count"]) == (7, 3)
        step(engine, 3)
        assert engine.lr == lr
        assert same_bits(weights_of(engine), expected)


@pytest.mark.world(2)
def test_pending_gathered_parameters_are_saved(tmp_path: Path) -> None:
    """With overlap the updated parameters are gathered in the next forward, which does not happen here."""
    with started("megatron:d2", path=model(), dtype="bfloat16", **OVERLAP) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(tmp_path / "run", DCP))
        expected = weights_of(engine)
    with started("megatron:d2", path=model(), dtype="bfloat16", **OVERLAP) as engine:
        engine.load(SaveLoadMeta(tmp_path / "run", DCP))
        assert same_bits(weights_of(engine), expected)


# ---- in other layouts


def everything(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in full, including optimizer state."""
    metadata = read_metadata(path)
    tensors = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
    }
    read_tensors(path, metadata, tensors)
    return tensors


CHAINS: dict[str, tuple[int, str, dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "dense": (2, "qwen3", {}, [("t2", {}), ("p2", {}), ("d2", {}), ("c2", PLAIN), ("t2", {})]),
    "tied": (2, "qwen3_tied", {"value_head": True}, [("p2", {}), ("d2", {}), ("t2", PLAIN), ("p2", {})]),
    "bf16": (2, "qwen3", {"dtype": "bfloat16"}, [("d2", {}), ("t2", {}), ("p2", {})]),
    "moe": (2, "qwen3_moe", {}, [("e2", {}), ("d2", {}), ("(attn:d1t2|ffn:d1e2)", {}), ("p2", {}), ("e2", {})]),
    "four": (4, "qwen3", {}, [("d2t2", {}), ("d4", {}), ("t2p2", {}), ("d2p2", {})]),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.world(world)) for n, (world, *_) in CHAINS.items()])
def test_megatron_checkpoint_is_bitwise_equal_in_other_layouts(name: str, tmp_path: Path) -> None:
    """Load in one layout after the other and save without a step: weights, main parameters and moments stay equal."""
    _, family, options, chain = CHAINS[name]
    options = {"path": model(family), **options}
    for i, (letters, more) in enumerate(chain):
        with started(f"megatron:{letters}", **options, **more) as engine:
            if i == 0:
                step(engine, 1)
                step(engine, 2)
                expected = weights_of(engine)
            else:
                engine.load(SaveLoadMeta(tmp_path / str(i - 1), DCP))
                assert same_bits(weights_of(engine), expected), letters
            engine.save(SaveLoadMeta(tmp_path / str(i), DCP))
    first, last = everything(tmp_path / "0"), everything(tmp_path / str(len(chain) - 1))
    assert same_bits(first, last)
    for key in first:
        if key.startswith("model."):
            moments = first[f"optim.{key.removeprefix('model.')}.exp_avg"]
            assert moments.any() != (key == "model.value_head.weight"), key  # tokens that the loss does not use


@pytest.mark.world(2)
def test_checkpoint_of_interleaved_stages(tmp_path: Path) -> None:
    with started("megatron:p2v2", path=model(**DEEP)) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(tmp_path / "v2", DCP))
        expected = weights_of(engine)
    with started("megatron:p2", path=model(**DEEP)) as engine:
        engine.load(SaveLoadMeta(tmp_path / "v2", DCP))
        assert same_bits(weights_of(engine), expected)
        engine.save(SaveLoadMeta(tmp_path / "p2", DCP))
    assert same_bits(everything(tmp_path / "v2"), everything(tmp_path / "p2"))


@pytest.mark.world(2)
def test_checkpoint_of_uneven_vocabulary(tmp_path: Path) -> None:
    path = model(vocab_size=VOCAB + 1)
    with started("megatron:t2", path=path) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(tmp_path / "t2", DCP))
        expected = weights_of(engine)
    with started("megatron:d2", path=path) as engine:
        engine.load(SaveLoadMeta(tmp_path / "t2", DCP))
        assert same_bits(weights_of(engine), expected)
        engine.save(SaveLoadMeta(tmp_path / "d2", DCP))
    with started("megatron:t2", path=path) as engine:
        engine.load(SaveLoadMeta(tmp_path / "d2", DCP))
        assert same_bits(weights_of(engine), expected)
    message = rf"embed_tokens.weight' has shape \[{VOCAB + 1}, \d+\], but the model needs \[{VOCAB + 2}, \d+\]"
    with (
        started("megatron:t2", path=model(vocab_size=VOCAB + 2)) as engine,
        unharmed(engine),
        pytest.raises(ValueError, match=message),
    ):
        engine.load(SaveLoadMeta(tmp_path / "t2", DCP))


DTYPES = {
    "bf16 to float32": ("bfloat16", {}, "float32", {}),
    "plain float32 to bf16": ("float32", PLAIN, "bfloat16", {}),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("name", [*DTYPES])
def test_main_parameters_load_in_another_dtype(name: str, tmp_path: Path) -> None:
    """Main parameters are restored in full, wherever the optimizer keeps them."""
    dtype, more, other, others = DTYPES[name]
    with started("megatron:d2", path=model(), dtype=dtype, **more) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(tmp_path / "run", DCP))
        engine.save(SaveLoadMeta(tmp_path / "hf"))
    with started("megatron:d2", path=model(), dtype=other, **others) as engine:
        engine.load(SaveLoadMeta(tmp_path / "run", DCP))
        engine.save(SaveLoadMeta(tmp_path / "again"))
    actual, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "hf"))
    assert actual["model.norm.weight"].dtype == torch.float32
    assert same_bits(actual, expected)


def go_on(letters: str, read: str | None, write: str, seed: int, family: str) -> None:
    """Take one step of a run: load a checkpoint and save the next."""
    with started(f"megatron:{letters}", path=model(family, **DEEP)) as engine:
        if read is not None:
            engine.load(SaveLoadMeta(read, DCP))
        step(engine, seed)
        engine.save(SaveLoadMeta(write, DCP))
        engine.save(SaveLoadMeta(f"{write}-hf"))


RUNS = {"qwen3": ["t2", "p2v2", "p2", "d2", "d1"], "qwen3_moe": ["e2", "d2", "e2p2", "d1"]}


@needs_own_world
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_megatron_checkpoint_resumes_in_other_layouts(family: str, tmp_path: Path) -> None:
    """Take one step in each layout, compared with a run that never stopped."""
    chain = RUNS[family]
    for run, layouts in {"moved": chain, "stayed": ["d1"] * len(chain)}.items():
        read = None
        for i, letters in enumerate(layouts):
            write = str(tmp_path / f"{run}{i}")
            size = 4 if letters == "e2p2" else int(letters[1])
            succeed(size, go_on, letters, read, write, i, family, timeout=180)
            read = write
    moved, stayed = (
        load_file(tmp_path / f"{run}{len(chain) - 1}-hf" / "model.safetensors") for run in ("moved", "stayed")
    )
    start = load_file(Path(model(family, **DEEP)) / "model.safetensors")
    assert moved.keys() == stayed.keys()
    for name in moved:
        # Compare norms: where a gradient is almost zero, AdamW amplifies its rounding to a step.
        change = (stayed[name] - start[name]).norm()
        assert (moved[name] - stayed[name]).norm() < 1e-3 * change, name


# ---- exchange with other programs


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("letters", "family", "rows"),
    [("p2", "qwen3", VOCAB), ("t2", "qwen3", VOCAB), ("t2", "qwen3_tied", VOCAB + 1), ("e2", "qwen3_moe", VOCAB)],
)
def test_checkpoint_loads_in_megatron_core(letters: str, family: str, rows: int, tmp_path: Path) -> None:
    """Load with ``dist_checkpointing.load`` into the state that Megatron-Core's model and optimizer request."""
    from megatron.core import dist_checkpointing

    with started(f"megatron:{letters}", path=model(family, vocab_size=rows)) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(tmp_path / "run", DCP))
        content = dist_checkpointing.load_content_metadata(str(tmp_path / "run"))
        metadata = {**content, "dp_cp_group": engine._components.checkpointer._groups.dp_cp}
        checkpointer = engine._components.checkpointer
        expected = weights_of(engine)
        module = checkpointer._chunks[0].module
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        # Modules have an extra state for Transformer Engine, which is empty.
        asked = {key: x for key, x in module.sharded_state_dict(metadata=metadata).items() if "_extra_state" not in key}
        module.load_state_dict(dist_checkpointing.load(asked, str(tmp_path / "run")), strict=False)
        assert same_bits(weights_of(engine), expected)
        own = module.sharded_state_dict(metadata=metadata)
        with torch.no_grad():
            asked = checkpointer._chained.sharded_state_dict(own, is_loading=True, metadata=metadata)
        state = dist_checkpointing.load({"optimizer": asked}, str(tmp_path / "run"))["optimizer"]
        optimizers = checkpointer._chained.chained_optimizers
        for i, optimizer in enumerate(optimizers):
            loaded = state[i] if len(optimizers) > 1 else state
            kept = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
            for name in ("param", "exp_avg", "exp_avg_sq"):
                entries = loaded["param_state"].values()
                flat = torch.cat([entry[name].flatten() for entry in entries])
                buffers = [
                    buffer for key, by_dtype in kept.items() if isinstance(key, int) for buffer in by_dtype.values()
                ]
                parameters = torch.cat(
                    [
                        buffers[at][name][start:stop]
                        for at, buffer in enumerate(optimizer.buffers)
                        for start, stop, _ in buffer.param_index_map.values()
                    ]
                )
                assert torch.equal(flat, parameters)
                assert flat.any()
            assert loaded["optimizer"]["param_groups"][0]["step"] == 1


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_checkpoint_without_optimizer(dtype: str, tmp_path: Path) -> None:
    light, full = SaveLoadMeta(tmp_path / "light", DCP, with_optim=False), SaveLoadMeta(tmp_path / "full", DCP)
    with started("megatron:d2", path=model(), dtype=dtype) as engine:
        step(engine, 1)
        engine.save(light)
        engine.save(full)
        expected = weights_of(engine)
        with pytest.raises(ValueError, match=r"light was saved with no optimizer state.*with_optim=False"):
            engine.load(SaveLoadMeta(tmp_path / "light", DCP))
        step(engine, 2)
        engine.load(light)
        assert same_bits(weights_of(engine), expected)
        engine.set_lr(0.0)
        step(engine, 3)  # copies the main parameters to the model's
        assert same_bits(weights_of(engine), expected)
    with started("megatron:d2", path=model(), dtype=dtype, optimizer=None) as engine:
        engine.load(full)
        assert same_bits(weights_of(engine), expected)


# ---- several checkpoints, asynchronous saves, and faults


@pytest.mark.world(2)
def test_async_save_contains_state_at_the_call(tmp_path: Path) -> None:
    """The tensors change in place during the save."""
    meta = SaveLoadMeta(tmp_path / "saved", DCP, asynchronous=True)
    with started("megatron:d2", path=model()) as engine:
        step(engine, 1)
        engine.save(SaveLoadMeta(tmp_path / "now", DCP))
        engine.save(meta)
        for seed in range(2, 5):
            step(engine, seed)
        engine.wait_for_checkpoint()
        assert is_complete(tmp_path / "saved")
    assert same_bits(everything(tmp_path / "saved"), everything(tmp_path / "now"))


@pytest.mark.world(2)
def test_megatron_retention_keeps_newest(tmp_path: Path) -> None:
    with started("megatron:p2", path=model()) as engine:
        for i in (0, 1, 2, 1):
            step(engine, i)
            engine.save(SaveLoadMeta(tmp_path / f"step{i}", DCP, keep_last=2, asynchronous=i == 2))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step1", "step2"]
        files = {file.name for file in verify(tmp_path / "step1").files}
        assert {".metadata", "common.pt", "metadata.json", "state.pt", "rng-00001.pt", "__1_0.distcp"} <= files


DAMAGES = {
    "value": (lambda path: flip(path / "__1_0.distcp"), r"__1_0\.distcp is damaged: its checksum"),
    "metadata": (lambda path: flip(path / ".metadata"), r"\.metadata is damaged"),
    "missing": (lambda path: (path / "state.pt").unlink(), r"state\.pt is missing"),
    "manifest": (lambda path: (path / "manifest.json").unlink(), r"no complete checkpoint"),
}


@pytest.mark.world(2)
def test_damaged_file_raises_and_loads_nothing(tmp_path: Path) -> None:
    with started("megatron:p2", path=model()) as engine:
        engine.save(SaveLoadMeta(tmp_path / "saved", DCP))
        step(engine, 1)
        for name, (spoil, message) in DAMAGES.items():
            if world().rank == 0:
                shutil.copytree(tmp_path / "saved", tmp_path / name)
                spoil(tmp_path / name)
            dist.barrier()
            with unharmed(engine), pytest.raises(ValueError, match=message):
                engine.load(SaveLoadMeta(tmp_path / name, DCP))


OTHERS = {
    "wider": ({"intermediate_size": 64}, r"layers\.[01]\.mlp\.\w+\.weight' has shape.*but the model needs"),
    "deeper": ({"num_hidden_layers": 4}, r"has '[\w.]*layers\.2\.[\w.]+', which the model has not"),
    "valued": ({}, r"has 'value_head\.weight', which the model has not"),
}


@pytest.mark.world(2)
def test_checkpoint_of_another_model_raises_and_loads_nothing(tmp_path: Path) -> None:
    for name, (changes, _) in OTHERS.items():
        with started("megatron:p2", path=model(**changes), value_head=name == "valued") as engine:
            engine.save(SaveLoadMeta(tmp_path / name, DCP))
    with started("megatron:p2", path=model()) as engine:
        for name, (_, message) in OTHERS.items():
            with unharmed(engine), pytest.raises(ValueError, match=message):
                engine.load(SaveLoadMeta(tmp_path / name, DCP))
        with unharmed(engine), pytest.raises(ValueError, match="saved with weight_format='dcp'"):
            engine.load(SaveLoadMeta(tmp_path / "wider"))
    with started("megatron:p2", path=model(**DEEP)) as engine, unharmed(engine):
        engine.load(SaveLoadMeta(tmp_path / "deeper", DCP))
