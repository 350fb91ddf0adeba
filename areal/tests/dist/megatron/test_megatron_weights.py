"""Weights of a Megatron-Core model from and to Hugging Face files, in every layout: equal bits, and float32 unrounded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import FinetuneSpec, OptimizerConfig, TrainEngine
from areal.engine.checkpoint.async_save import CheckpointSaver
from areal.engine.checkpoint.huggingface import prepare_hf
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.registry import create_engine
from areal.tests.dist.checkpoint.weight_files import DAMAGES, copied, edit, on_disk
from areal.tests.grid.layouts import LAYOUTS, Layout
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import (
    config,
    global_batch,
    gradients_of,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import cached, world

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_tied", "smollm", "qwen3_moe", "deepseek_v3")
ADAMW = OptimizerConfig(lr=0.01, weight_decay=0.0, eps=1e-8, gradient_clipping=None)
SPLIT = {
    2: ("megatron:d2", "megatron:t2", "megatron:p2", "megatron:e2", "megatron:p2v2"),
    4: ("megatron:e2t2", "megatron:d2p2"),
}
"""Layouts that place the main parameters of tiny mixtures of experts differently."""
ALL_FAMILIES = ("megatron:d1", "megatron:t2p2")
"""Layouts in which every family runs."""


def everywhere(*families: str) -> list[Any]:
    """Return every layout with two of its families in turn; one rank and ``t2p2`` get all families."""
    layouts = {layout.backend: layout for layout in LAYOUTS["megatron"]}.values()
    pairs = []
    for number, layout in enumerate(layouts):
        takes = [family for family in families if family not in layout.refuses]
        turn = takes[number % len(takes) :] + takes[: number % len(takes)]
        pairs += [(layout, family) for family in (takes if layout.backend in ALL_FAMILIES else turn[:2])]
    marks = [pytest.mark.world(layout.world) for layout, _ in pairs]
    return [
        pytest.param(layout, family, marks=mark, id=f"{layout.backend}-{family}")
        for (layout, family), mark in zip(pairs, marks, strict=True)
    ]


MISTRAL = pytest.param(Layout("megatron:t2"), "mistral", marks=pytest.mark.world(2), id="megatron:t2-mistral")


def mixtures() -> list[Any]:
    """Return backends for a mixture of experts with four layers, each marked with its world."""
    return [pytest.param(b, marks=pytest.mark.world(size), id=b) for size, backends in SPLIT.items() for b in backends]


def moe(**changes: Any) -> str:
    return model_dir("qwen3_moe", num_hidden_layers=4, **changes)


def saved(engine: TrainEngine, path: Path, **options: Any) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint in the Hugging Face format."""
    save_hf(engine, path, **options)
    result = {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
    dist.barrier()
    return result


def save_hf(engine: TrainEngine, path: Path, *, asynchronous: bool = False, **options: Any) -> CheckpointSaver:
    """Save only the weights. Returns the pending save."""
    weights, saver = engine._components.weights, CheckpointSaver(engine.control)
    source = engine.config.path
    saver.save(
        path,
        "hf",
        lambda draft: prepare_hf(weights.export(), engine.control, source, draft, asynchronous=asynchronous, **options),
        asynchronous=asynchronous,
    )
    return saver


# ---- round trips


@pytest.mark.parametrize(("layout", "family"), [*everywhere(*FAMILIES), MISTRAL])
def test_megatron_streams_and_saves_hf_files(layout: Layout, family: str, tmp_path: Path) -> None:
    path = model_dir(family, **layout.changes)
    with started(layout.backend, path=path) as engine:
        assert same_bits(weights_of(engine), on_disk(path))
        assert same_bits(saved(engine, tmp_path / "saved"), on_disk(path))
        names = [name for name, _ in engine.named_tensors()]
    assert len(names) == len(set(names))
    assert names == cached("order", path, lambda: names)  # in every layout
    layer_numbers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layer_numbers == sorted(layer_numbers)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == ("model.norm.weight" if family in ("qwen3_tied", "smollm") else "lm_head.weight")


VOCABULARIES = [(2, "t2", 111), (4, "t2p2", 111), (4, "t4", 5)]


@pytest.mark.parametrize(
    ("letters", "vocabulary"),
    [pytest.param(b, v, marks=pytest.mark.world(size), id=f"{b}-{v}") for size, b, v in VOCABULARIES],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied"])
def test_weights_of_uneven_vocabulary(letters: str, vocabulary: int, family: str, tmp_path: Path) -> None:
    """Padding rows are not weights; with five rows over four ranks, the last rank gets padding only."""
    path = model_dir(family, vocab_size=vocabulary, num_key_value_heads=4)
    with started(f"megatron:{letters}", path=path) as engine:
        assert same_bits(weights_of(engine), on_disk(path))
        assert same_bits(saved(engine, tmp_path / "saved"), on_disk(path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", mixtures())
def test_named_tensors_keep_any_bits(backend: str, dtype: str) -> None:
    """Stream negative zeros, infinities and NaNs of every kind."""
    integers, n = {"float32": (torch.int32, 2**31), "bfloat16": (torch.int16, 2**15)}[dtype]
    generator = torch.Generator().manual_seed(1)
    bits = {
        name: torch.randint(-n, n, tensor.shape, generator=generator).to(integers).view(getattr(torch, dtype))
        for name, tensor in sorted(on_disk(moe()).items())
    }
    bits["model.norm.weight"][:2] = torch.tensor([-0.0, float("nan")])
    with started(backend, path=moe(), dtype=dtype, optimizer=None) as engine:
        for local_param in engine._components.weights.local_params:
            for piece in local_param.slices(local_param.parameter.detach().view(-1).view(integers)):
                piece.values.copy_(bits[piece.name].view(integers)[piece.box])
        assert same_bits(weights_of(engine), bits)


@pytest.mark.world(4)
def test_each_rank_reads_only_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], TensorFiles.read

    def counting(files: TensorFiles, key: str, index: tuple[slice, ...]) -> Tensor:
        tensor = original(files, key, index)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(TensorFiles, "read", counting)
    path = model_dir("qwen3")
    with started("megatron:t2p2", path=path):
        counts: list[int] = [0] * 4
        dist.all_gather_object(counts, sum(read))
    total = sum(tensor.numel() for tensor in on_disk(path).values())
    assert total <= sum(counts) < 1.05 * total  # norms are replicated on several ranks
    assert max(counts) < 0.3 * total


# ---- float32 main parameters


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("backend", mixtures())
def test_main_parameters_load_float32_files_unrounded(backend: str, distributed: bool, tmp_path: Path) -> None:
    """Compare at the start, after a later load, and after a step."""
    first, second = moe(), moe(seed=2)
    settings = {"distributed_optimizer": distributed}
    with started(backend, path=first, dtype="bfloat16", optimizer=ADAMW, megatron=settings) as engine:
        assert same_bits(weights_of(engine), rounded(on_disk(first)))
        assert same_bits(saved(engine, tmp_path / "first"), on_disk(first))
        engine.forward_backward(local_batch(engine, global_batch()), loss)
        gradients = gradients_of(engine)
        engine.optimizer_step()
        stepped = saved(engine, tmp_path / "stepped")
        assert same_bits(weights_of(engine), rounded(stepped))
        weights = engine._components.weights
        weights.check(Path(second))
        weights.read(Path(second))
        assert same_bits(weights_of(engine), rounded(on_disk(second)))
        assert same_bits(saved(engine, tmp_path / "second"), on_disk(second))
    for name, start in on_disk(first).items():
        gradient = gradients[name].double()
        expected = start.double() - ADAMW.lr * gradient / (gradient.abs() + ADAMW.eps)  # the first step of Adam
        torch.testing.assert_close(stepped[name].double(), expected, rtol=3e-7, atol=1e-7)  # bf16 would be off by 4e-3


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


# ---- random weights


@pytest.mark.parametrize("backend", mixtures())
def test_random_weights_equal_the_fsdp_engine(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": moe(), "init_from_scratch": True, "value_head": True, "seed": 5}
    with started(f"fsdp:d{dist.get_world_size()}", **options) as engine:
        expected = weights_of(engine)
    with started(backend, **options) as engine:
        assert same_bits(weights_of(engine), expected)
    with started(backend, **options, dtype="bfloat16") as engine:
        assert same_bits(weights_of(engine), rounded(expected))
        assert same_bits(saved(engine, tmp_path / "saved"), expected)
    assert not expected["value_head.weight"].any()
    assert not torch.equal(expected["lm_head.weight"], on_disk(moe())["lm_head.weight"])


@pytest.mark.world(1, 2)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_tied", "smollm"])
def test_random_weights_of_other_families(family: str, world_size: int) -> None:
    options: dict[str, Any] = {"path": model_dir(family), "init_from_scratch": True}
    with started(f"fsdp:d{world_size}", **options) as engine:
        expected = weights_of(engine)
    with started({1: "megatron:d1", 2: "megatron:p2"}[world_size], **options) as engine:
        assert same_bits(weights_of(engine), expected)


# ---- checkpoints in the Hugging Face format


@pytest.mark.parametrize(("layout", "family"), everywhere("qwen3_tied", "qwen3_moe"))
def test_hf_checkpoint_loads_in_transformers(layout: Layout, family: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with started(layout.backend, path=model_dir(family, **layout.changes), optimizer=ADAMW) as engine:
        engine.train_batch(local_batch(engine, global_batch(1)), loss)
        save_hf(engine, path)
        trained = weights_of(engine)
        samples = local_batch(engine, global_batch())
        outputs = engine.forward_batch(samples, outputs=("logits",))
    plain, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert plain.dtype == torch.float32
    assert not any(report.values())
    assert same_bits(on_disk(path), trained)
    for sample, logits in zip(samples, outputs, strict=True):
        expected = plain(sample["input_ids"][None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron_hf_checkpoint_in_several_files(world_size: int, asynchronous: bool, tmp_path: Path) -> None:
    """An asynchronous save contains the weights at the time of the call, and config.json describes them."""
    backend, path = {1: "d1", 2: "t2", 4: "t2p2"}[world_size], tmp_path / "saved"
    source = model_dir("qwen3", value_head=True)
    with started(f"megatron:{backend}", path=source, dtype="bfloat16", value_head=True) as engine:
        saver = save_hf(engine, path, asynchronous=asynchronous, max_file_bytes=12_000)
        engine.train_batch(local_batch(engine, global_batch()), loss)
        saver.wait()
    result = {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
    head = load_file(Path(source) / "value_head.safetensors")
    assert same_bits(result, on_disk(source) | head)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(on_disk(source))
    assert len(set(index["weight_map"].values())) > 5
    about = json.loads((path / "config.json").read_text())
    assert about["dtype"] == "float32"
    assert about["architectures"] == ["Qwen3ForCausalLM"]
    assert not any(AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)[1].values())


@pytest.mark.world(2)
def test_hf_checkpoint_without_optimizer_has_parameters(tmp_path: Path) -> None:
    with started("megatron:p2", dtype="bfloat16", optimizer=None) as engine:
        assert same_bits(saved(engine, tmp_path / "saved"), rounded(on_disk(model_dir("qwen3"))))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16


@pytest.mark.world(2)
def test_pending_gathered_weights_are_streamed(tmp_path: Path) -> None:
    """With overlapped gathers a step leaves parameters to be gathered by the next forward or by the first reader."""
    overlap = {"overlap_param_gather": True, "bucket_size": 1000}
    with started("megatron:d2", megatron=overlap, optimizer=ADAMW) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        result = saved(engine, tmp_path / "saved")
        assert same_bits(result, weights_of(engine))
        assert not same_bits(result, on_disk(model_dir("qwen3")))
        engine.train_batch(local_batch(engine, global_batch(1)), loss)
        engine._components.weights.read(Path(model_dir("qwen3")))
        engine.eval_batch(local_batch(engine, global_batch()), loss)
        assert same_bits(weights_of(engine), on_disk(model_dir("qwen3")))


# ---- files that do not match the model


@pytest.mark.world(2)
@pytest.mark.parametrize("damage", [*DAMAGES])
def test_mismatched_files_raise_on_every_rank(damage: str, tmp_path: Path) -> None:
    apply, message = DAMAGES[damage]
    folder = copied("qwen3", tmp_path)
    with started("megatron:p2", path=str(folder)) as engine:
        before = weights_of(engine)
        if world().rank == 0:
            apply(folder)
        dist.barrier()
        with pytest.raises(ValueError, match=message):  # a checkpoint is validated before any change
            engine._components.weights.check(folder)
        assert same_bits(weights_of(engine), before)
    engine = create_engine(config("megatron:p2", path=str(folder)))
    with pytest.raises(ValueError, match=message):
        engine.initialize(FinetuneSpec(total_train_steps=1))
    with started("megatron:p2"):  # the world still works
        dist.barrier()


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def doubled(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.mark.world(2)
@pytest.mark.parametrize("change", [renamed, doubled])
def test_megatron_known_extra_keys_are_ignored(change: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    folder = copied("qwen3_tied", tmp_path)
    if world().rank == 0:
        edit(change)(folder)
        edit(lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(4)}))(folder)
    dist.barrier()
    with started("megatron:p2", path=str(folder)) as engine:
        assert same_bits(weights_of(engine), on_disk(model_dir("qwen3_tied")))


@pytest.mark.world(2)
def test_value_head_is_read_from_its_file(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    with started("megatron:p2", path=str(folder), value_head=True) as engine:
        assert not weights_of(engine)["value_head.weight"].any()
    head = torch.arange(32.0).view(1, 32)
    if world().rank == 0:
        save_file({"value_head.weight": head}, folder / "value_head.safetensors")
    dist.barrier()
    with started("megatron:p2", path=str(folder), value_head=True) as engine:
        assert torch.equal(weights_of(engine)["value_head.weight"], head)
        if world().rank == 0:
            save_file({"value_head.weight": head[:, 1:].contiguous()}, folder / "value_head.safetensors")
        dist.barrier()
        with pytest.raises(ValueError, match=r"value_head\.safetensors.*shape \[1, 31\].*\[1, 32\]"):
            engine._components.weights.check(folder)
    with started("megatron:p2", path=str(folder)) as engine:
        assert "value_head.weight" not in weights_of(engine)
