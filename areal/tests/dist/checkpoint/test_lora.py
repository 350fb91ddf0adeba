"""Adapters: properties that the grid's option ``lora`` does not test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from areal.api import LoRAConfig, SaveLoadMeta
from areal.tests.dist.checkpoint.lora_engines import adapted, logprobs, mine_of, model_of, moments, of, scores, train
from areal.tests.grid.compare import assert_tensors
from areal.tests.grid.layouts import LORA
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.harness.tiny import (
    config,
    global_batch,
    gradients_of,
    layout,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)

FOUR = [pytest.mark.world(4)]
LAYOUTS = [
    pytest.param("fsdp:d1", marks=pytest.mark.world(1)),
    pytest.param("fsdp:d2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:t2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:p2", marks=[pytest.mark.world(2)]),
    pytest.param("megatron:t2", marks=pytest.mark.world(2)),
    pytest.param("megatron:p2", marks=pytest.mark.world(2)),
    layout("jax:d1"),
]
ON_FOUR_RANKS = [pytest.param(backend, marks=FOUR) for backend in ("fsdp:d2t2", "megatron:t2p2")]


def model_has_gradients(engine: Any) -> bool:
    model = engine._components.model
    if isinstance(model, nn.Module):
        return any(parameter.grad is not None for parameter in model.parameters())
    return model.grads is not None


def model_is_offloaded(engine: Any) -> bool:
    model = engine._components.model
    if isinstance(model, nn.Module):
        return all(x.untyped_storage().nbytes() == 0 for x in model_of(engine))
    return not model.params


@pytest.mark.parametrize("backend", LAYOUTS)
def test_new_adapter_does_not_change_outputs(backend: str) -> None:
    with started(backend) as engine:
        plain = logprobs(engine)
    with adapted(backend) as engine:
        if backend.startswith("jax"):
            # XLA fuses the programs with and without adapters differently.
            assert max((a - b).abs().max() for a, b in zip(logprobs(engine), plain, strict=True)) < 1e-5
            plain = logprobs(engine)
        assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), plain, strict=True))
        first = of(engine)
        engine.adapters.add("other", seed=7)
        engine.adapters.select("other")
        assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), plain, strict=True))
        ups = {name for name in first if "lora_B" in name}
        assert ups
        assert not any(first[name].any() for name in ups)
        assert not any(torch.equal(x, first[name]) for name, x in of(engine).items() if name not in ups)


@pytest.mark.world(2)
def test_adapter_init_does_not_depend_on_layout() -> None:
    drawn = []
    for backend in ("fsdp:d2", "fsdp:t2", "megatron:t2", "megatron:p2"):
        with adapted(backend, seed=3) as engine:
            drawn.append(of(engine))
    assert all(same_bits(one, drawn[0]) for one in drawn)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_adapter_training_keeps_model_weights_bitwise(backend: str) -> None:
    with adapted(backend) as engine:
        before, start = [x.clone() for x in model_of(engine)], of(engine)
        plain = logprobs(engine)
        train(engine, 1, 2, 3)
        assert all(torch.equal(x, b) for x, b in zip(model_of(engine), before, strict=True))
        assert not model_has_gradients(engine)
        assert not any(torch.equal(x, start[name]) for name, x in of(engine).items())
        trained = logprobs(engine)
        assert not any(torch.equal(a, b) for a, b in zip(trained, plain, strict=True) if len(a) > 1)
        with engine.reference():
            assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), plain, strict=True))
            with pytest.raises(RuntimeError, match=r"inside reference\(\) nothing is trained"):
                engine.train_batch(local_batch(engine, global_batch(1)), loss)
        assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), trained, strict=True))
        copies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            copies, {f.name: f.parameter.tolist() for f in engine.adapters["default"].factors if f.split_dim is None}
        )
        for copy in copies:
            shared = copy.keys() & copies[0].keys()  # other pipeline stages have other layers
            assert all(copy[name] == copies[0][name] for name in shared)
        assert any(copies[0])


@pytest.mark.parametrize("backend", LAYOUTS)
def test_adapters_are_isolated_bitwise(backend: str) -> None:
    """Train two adapters in turn, with gradients of both pending at the same time: each equals one that is trained alone."""
    alone = {}
    for name, seed in (("a", 11), ("b", 22)):
        with adapted(backend) as engine:
            engine.adapters.add(name, seed=seed)
            engine.adapters.select(name)
            if name == "b":
                engine.set_lr(0.003)
            train(engine, *((1, 2, 3) if name == "a" else (5, 6)))
            alone[name] = of(engine), moments(engine, name), engine.lr
    with adapted(backend) as engine:
        engine.adapters.add("a", seed=11)
        engine.adapters.add("b", seed=22)
        engine.adapters.select("b")
        engine.set_lr(0.003)
        for number, name in enumerate("abab"):
            engine.adapters.select(name)
            step = {"a": 1, "b": 5}[name] + number // 2
            engine.forward_backward(local_batch(engine, global_batch(step)), loss)
            other = "ab".replace(name, "")
            engine.adapters.select(other)
            if number % 2:
                engine.optimizer_step()
                engine.adapters.select(name)
                engine.optimizer_step()
        engine.adapters.select("a")
        train(engine, 3)
        for name, (weights, state, lr) in alone.items():
            engine.adapters.select(name)
            assert same_bits(of(engine), weights), name
            assert same_bits(moments(engine, name), state), name
            assert engine.lr == lr


@pytest.mark.parametrize("backend", LAYOUTS)
def test_reading_gradients_then_accumulating_counts_each_once(backend: str) -> None:
    with adapted(backend) as engine:
        train(engine, 1)
        everything = [local_batch(engine, global_batch(seed)) for seed in (2, 3)]
        for batch in everything:
            engine.forward_backward(batch, loss, normalization="sum")
        expected = gradients_of(engine)
        engine.zero_grad()
        for batch in everything:
            engine.forward_backward(batch, loss, normalization="sum")
            actual = gradients_of(engine)
        assert_tensors(iter(actual.items()), expected, 1e-5)


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_adapter_round_trips_with_peft(backend: str, family: str, tmp_path: Path) -> None:
    path = model_dir(family)
    theirs = adapter_dir(path, LORA)
    with adapted(backend, path=path) as engine:
        engine.adapters.load("theirs", theirs)
        engine.adapters.select("theirs")
        assert same_bits(of(engine), load_file(Path(theirs) / "adapter_model.safetensors"))
        train(engine, 1, 2)
        engine.adapters.save("theirs", tmp_path / "ours")
        trained, actual = of(engine), logprobs(engine)
        engine.save(SaveLoadMeta(tmp_path / "merged"))
        streamed = weights_of(engine)
    assert same_bits(load_file(tmp_path / "ours" / "adapter_model.safetensors"), trained)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    ours = PeftModel.from_pretrained(model, str(tmp_path / "ours")).eval()
    assert ours.peft_config["default"].base_model_name_or_path == path
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    batch = mine_of(backend)
    for one, expected in zip(batch, actual, strict=True):
        for other in (ours, merged):
            assert (scores(other, one) - expected).abs().max() < 2e-5
    plain = ours.merge_and_unload().state_dict()
    assert_tensors(iter(streamed.items()), {name: plain[name] for name in streamed}, 1e-6)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param("fsdp:d1", "fsdp:d1", marks=pytest.mark.world(1)),
        pytest.param("fsdp:d2", "fsdp:t2", marks=pytest.mark.world(2)),
        pytest.param("fsdp:t2", "megatron:p2", marks=pytest.mark.world(2)),
        pytest.param("megatron:p2", "fsdp:c2", marks=pytest.mark.world(2)),
        pytest.param("fsdp:d2t2", "fsdp:d4", marks=FOUR),
        *(
            pytest.param(write, read, marks=[pytest.mark.world(2, timeout=400)])
            for write, read in (
                *(("fsdp:t2", "jax:d2"), ("jax:d2", "jax:t2"), ("jax:t2", "megatron:p2")),
                *(("jax:d2", "fsdp:d2"), ("megatron:t2", "jax:d2")),
            )
        ),
        pytest.param("jax:d1", "jax:d1", marks=[pytest.mark.world(1)]),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_adapter_run_resumes_in_another_layout(write: str, read: str, asynchronous: bool, tmp_path: Path) -> None:
    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp", asynchronous=asynchronous)
    with adapted(write) as engine:
        engine.adapters.add("second", LoRAConfig(rank=2, target_modules=("q_proj", "down_proj")), seed=5)
        train(engine, 1)
        engine.adapters.select("second")
        train(engine, 2, 3)
        engine.set_version(4)
        engine.save(meta)
        saved = {}
        for name in ("default", "second"):
            engine.adapters.select(name)
            saved[name] = of(engine), engine.lr
        engine.adapters.select("second")
        train(engine, 6)
        went_on = of(engine)
        engine.wait_for_checkpoint()
    with adapted(read) as engine:
        engine.adapters.add("third")
        engine.load(SaveLoadMeta(meta.path, weight_format="dcp"))
        assert engine.adapters.names == ("default", "second")
        assert (engine.adapters.selected, engine.version) == ("second", 4)
        for name, (weights, lr) in saved.items():
            engine.adapters.select(name)
            assert same_bits(of(engine), weights)
            assert engine.lr == lr
        engine.adapters.select("second")
        train(engine, 6)
        if read == write:
            assert same_bits(of(engine), went_on)
        else:
            before = saved["second"][0]
            for name, weight in of(engine).items():
                change = (went_on[name] - before[name]).norm()
                assert change > 0
                assert (weight - went_on[name]).norm() <= 2e-3 * change + 1e-6, name


@pytest.mark.parametrize("backend", [*LAYOUTS, layout("jax:d2"), *ON_FOUR_RANKS])
def test_single_adapter_is_saved_and_resumed(backend: str, tmp_path: Path) -> None:
    with adapted(backend) as engine:
        train(engine, 1, 2)
        engine.adapters.save("default", tmp_path / "one", with_optim=True)
        engine.adapters.load("copy", tmp_path / "one", with_optim=True)
        engine.adapters.load("afresh", tmp_path / "one")
        rate = engine.lr
        after = {}
        for name in ("default", "copy", "afresh"):
            engine.adapters.select(name)
            assert (engine.lr == rate) == (name != "afresh")
            train(engine, 3)
            after[name] = of(engine)
        assert same_bits(after["copy"], after["default"])
        assert not same_bits(after["afresh"], after["default"])


@pytest.mark.world(1, 2)
def test_invalid_adapter_names_and_files_raise(tmp_path: Path) -> None:
    backend = f"fsdp:d{dist.get_world_size()}"
    with adapted(backend) as engine:
        adapters = engine.adapters
        before = of(engine)
        other = adapter_dir(model_dir("llama", hidden_size=24, head_dim=6), LORA)
        few = adapter_dir(model_dir("llama"), LoRAConfig(target_modules=("embed_tokens",)))
        adapters.save("default", tmp_path / "plain")
        for call, message in (
            (lambda: adapters.select("b"), r"no adapter 'b': choose one of default"),
            (lambda: adapters.remove("b"), r"no adapter 'b'"),
            (lambda: adapters.remove("default"), r"'default' is selected: select another"),
            (lambda: adapters.save("b", tmp_path / "b"), r"no adapter 'b'"),
            (lambda: adapters.add("default"), r"there is an adapter 'default' already"),
            (lambda: adapters.add("../up"), r"adapter name '../up'"),
            (
                lambda: adapters.add("b", LoRAConfig(target_modules=("nothing",))),
                r"(?s)target_modules = \('nothing',\).*not found",
            ),
            (lambda: adapters.load("b", tmp_path / "nowhere"), r"no adapter that peft can read"),
            (lambda: adapters.load("b", other), r"has shape \[.*\], but the model needs"),
            (lambda: adapters.load("b", few), r"embed_tokens, which is not a linear layer"),
            (lambda: adapters.load("b", tmp_path / "plain", with_optim=True), r"saved without optimizer state"),
            (lambda: engine.load(SaveLoadMeta(model_dir("qwen3"))), r"load an adapter with engine.adapters.load"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert adapters.names == ("default",)
        assert same_bits(of(engine), before)
        train(engine, 1)


@pytest.mark.world(1)
def test_adapter_calls_raise_without_adapters() -> None:
    with started("fsdp:d1") as engine:
        with pytest.raises(RuntimeError, match=r"has no adapters: set TrainEngineConfig.lora"):
            _ = engine.adapters
        with pytest.raises(RuntimeError, match=r"make a second engine"):
            engine.reference()
    with pytest.raises(ValueError, match=r"value_head = True with lora"):
        config("fsdp:d1", value_head=True, lora=LORA)
    with pytest.raises(ValueError, match=r"the moments of adapters are float32"):
        config("fsdp:d1", fsdp={"optimizer_state_dtype": "bfloat16"}, lora=LORA)


@pytest.mark.world(1)
def test_adapter_without_optimizer_evaluates() -> None:
    theirs = adapter_dir(model_dir("qwen3"), LORA)
    with adapted("fsdp:d1", optimizer=None) as engine:
        plain = logprobs(engine)
        engine.adapters.load("default", theirs)
        assert not any(torch.equal(a, b) for a, b in zip(logprobs(engine), plain, strict=True) if len(a) > 1)
        with pytest.raises(RuntimeError, match="no optimizer"):
            train(engine, 1)


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:d2", layout("jax:d2")])
def test_offload_with_adapter_changes_nothing(backend: str) -> None:
    results = []
    for offload in (False, True):
        with adapted(backend) as engine:
            for seed in (1, 2):
                engine.forward_backward(local_batch(engine, global_batch(seed)), loss)
                if offload:
                    engine.offload()
                    assert model_is_offloaded(engine)
                engine.optimizer_step()
            results.append(of(engine))
    assert same_bits(*results)
