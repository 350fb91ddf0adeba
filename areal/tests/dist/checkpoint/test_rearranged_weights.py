"""Models whose files contain weights in another form than memory: merged, interleaved, or divided. Compared with transformers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal.api import LoRAConfig, SaveLoadMeta
from areal.engine.checkpoint.tensor_layout import disk_layout, joined, stored_tensors
from areal.engine.model.tiny_config import shrink
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import (
    Sample,
    global_batch,
    gradients_of,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
    writing,
)
from areal.tests.harness.world import world
from areal.weight_sync.apply import ModuleSource, load_named

FAMILIES = ["hrm_text", "inkling2_text", "olmo_hybrid"]
"""Files merge projections; interleave the rows of gate and up projections; divide a convolution."""


def of(family: str, *marks: Any, backend: str = "") -> Any:
    """Return a parameter for a family. It is skipped where transformers is too old to have it."""
    reason = f"transformers {transformers.__version__} has no {family}"
    missing = pytest.mark.skipif(family not in CONFIG_MAPPING, reason=reason)
    return pytest.param(*([backend] if backend else []), family, marks=[missing, *marks])


ONE, TWO, FOUR = (pytest.mark.world(size) for size in (1, 2, 4))
LAYOUTS = [
    *(of(family, ONE, backend="fsdp:d1") for family in FAMILIES),
    of("hrm_text", TWO, backend="fsdp:d2"),
    of("olmo_hybrid", TWO, backend="fsdp:d2"),
    of("inkling2_text", TWO, backend="fsdp:d2"),
    of("inkling2_text", TWO, backend="fsdp:e2"),
    of("inkling2_text", FOUR, backend="fsdp:d2e2"),
    of("hrm_text", FOUR, backend="fsdp:d4"),
]


def files_of(path: str | Path) -> dict[str, Tensor]:
    return load_file(Path(path) / "model.safetensors")


def loaded(path: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def expected_step(path: str, batch: Iterable[Sample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each sequence, and the gradients of the policy loss in the form of files."""
    model, weight, rows = loaded(path), 0.0, []
    for sample in batch:
        ids = sample["input_ids"]
        logprobs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        row = torch.cat([logprobs[:-1].gather(-1, ids[1:, None])[:, 0], torch.zeros(1)])
        mask = sample["loss_mask"] * (torch.arange(len(ids)) < len(ids) - 1)
        weight += mask.sum().item()
        (-(row * sample["advantages"] * mask).sum()).backward()
        rows.append(row.detach())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return rows, {name: x / weight for name, x in revert_weight_conversion(model, gradients).items()}


@pytest.mark.parametrize(("backend", "family"), LAYOUTS)
def test_weights_gradients_and_files_equal_those_of_transformers(backend: str, family: str, tmp_path: Path) -> None:
    path, saved, again = model_dir(family), tmp_path / "saved", tmp_path / f"again-{world().rank}"
    with started(backend, path=path) as engine:
        # Loaded, streamed and saved without a change.
        assert same_bits(weights_of(engine), files_of(path))
        # Outputs and gradients.
        rows, gradients = expected_step(path, global_batch())
        batch = local_batch(engine, global_batch())
        for actual, expected in zip(engine.forward_batch(batch), rows[engine.dp_rank :: engine.dp_size], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        engine.forward_backward(batch, loss)
        for name, gradient in gradients_of(engine).items():
            want = gradients.get(name, torch.zeros_like(gradient))
            assert (gradient - want).abs().max() <= 1e-3 * want.abs().max() + 1e-6, name
        # A trained model: transformers reads what the engine wrote, and writes the same files.
        engine.optimizer_step()
        trained = weights_of(engine)
        engine.save(SaveLoadMeta(saved))
        with writing():
            loaded(saved).save_pretrained(again)
        assert not same_bits(trained, files_of(path))
        assert same_bits(files_of(again), trained)
        assert same_bits(files_of(saved), trained)
        engine.load(SaveLoadMeta(path))
        assert same_bits(weights_of(engine), files_of(path))


@pytest.mark.world(2)
def test_files_may_divide_a_tensor_in_other_sizes(tmp_path: Path) -> None:
    """transformers writes the convolutions of queries, keys and values in equal sizes, but reads the sizes of the model."""
    path, folder, sizes = model_dir("olmo_hybrid"), tmp_path / "model", (24, 24, 48)
    tensors = files_of(path)
    keys = [f"model.layers.0.linear_attn.{x}_conv1d.weight" for x in "qkv"]
    lengths = tuple(len(tensors[key]) for key in keys)
    if lengths == sizes:
        pytest.skip("this release of transformers writes the sizes of the model")
    assert lengths == (32, 32, 32)
    if world().rank == 0:
        shutil.copytree(path, folder)
        parts = torch.cat([tensors[key] for key in keys]).split(sizes)
        tensors |= {key: part.contiguous() for key, part in zip(keys, parts, strict=True)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    with started("fsdp:d2", path=str(folder)) as engine:
        assert same_bits(weights_of(engine), files_of(path))
    if world().rank == 0:
        tensors[keys[0]] = tensors[keys[0]][1:].contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    with (
        pytest.raises(ValueError, match=r"q_conv1d.weight' has shape \[23, 1, 4\]"),
        started("fsdp:d2", path=str(folder)),
    ):
        pass


@pytest.mark.parametrize("family", [of(family) for family in FAMILIES])
def test_replicas_receive_rearranged_weights(family: str) -> None:
    source, target = loaded(model_dir(family)), loaded(model_dir(family, initializer_range=0.01))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    sent = dict(ModuleSource(source).named_tensors())
    assert same_bits({name: x.contiguous() for name, x in sent.items()}, files_of(model_dir(family)))
    load_named(target, ModuleSource(source).named_tensors())
    assert same_bits(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("family", [of(family) for family in FAMILIES])
def test_any_box_is_read_from_its_slices_on_disk(family: str) -> None:
    model, files, rng = loaded(model_dir(family)), files_of(model_dir(family)), random.Random(0)
    tensors = dict(stored_tensors(model))
    for name, pieces in disk_layout(model).items():
        for _ in range(4):
            box = []
            for size in tensors[name].shape:
                start = rng.randrange(size)
                box.append(slice(start, rng.randrange(start, size) + 1))
            expected = tensors[name].detach()[tuple(box)]
            actual = torch.full_like(expected, torch.nan)
            for piece in pieces:
                shared = piece.overlap(tuple(box))
                if shared is not None:
                    actual[shared[1]] = files[piece.name][shared[0]].view(actual[shared[1]].shape)
            assert torch.equal(actual, expected), name


def test_layout_on_disk_of_every_family_equals_the_conversion_of_transformers() -> None:
    """Tiny copies of all causal language models that transformers can build."""
    compared = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        model = tiny_copy(family)
        if model is None:
            continue
        tensors = {name: torch.randn(x.shape).to(x.dtype) for name, x in stored_tensors(model)}
        layout = disk_layout(model)
        actual = joined((piece, piece.cut(tensors[name])) for name, pieces in layout.items() for piece in pieces)
        expected = revert_weight_conversion(model, dict(tensors))
        assert same_bits(
            {name: x.contiguous() for name, x in actual}, {name: x.contiguous() for name, x in expected.items()}
        ), family
        compared.append(family)
    assert len(compared) > 120
    assert set(FAMILIES) & set(CONFIG_MAPPING) <= set(compared)


def tiny_copy(family: str) -> Any:
    """Return a small model without values, or ``None`` if its configuration cannot be reduced."""
    try:
        config = shrink(CONFIG_MAPPING[family]())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception:  # some families need settings that no default has, and raise anything
        return None
    return model if sum(parameter.numel() for parameter in model.parameters()) < 3e7 else None


@pytest.mark.world(1)
def test_adapter_of_a_merged_layer_is_not_merged_into_weights() -> None:
    with started("fsdp:d1", path=model_dir("hrm_text"), lora=LoRAConfig(rank=2)) as engine:
        with pytest.raises(ValueError, match=r"stores .* merged with other layers.*adapter alone"):
            next(iter(engine.named_tensors()))
        assert any("q_proj" in name for name, _ in engine.adapters.named_tensors())
