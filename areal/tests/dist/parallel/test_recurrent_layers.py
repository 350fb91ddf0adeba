"""Families with recurrent layers, packed: outputs and gradients of every layout beside transformers, one sequence at a time, in float64."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import Batch, LoRAConfig, MicroBatchSpec, ParallelDims, SaveLoadMeta, TokenOutputs
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.token_stream import TokenStream
from areal.engine.lora.peft_format import plan_adapter
from areal.engine.recurrence import functions
from areal.engine.recurrence.rows import run_in_rows
from areal.tests.grid.cases import CASES, samples
from areal.tests.grid.compare import assert_rows, assert_tensors
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import adapter_dir
from areal.tests.grid.recurrent_models import RECURRENT_FAMILIES
from areal.tests.grid.reference import Reference
from areal.tests.harness.tiny import family_dir, gradients_as_in_files, gradients_of, same_bits, started, writing
from areal.tests.harness.world import cached, record

FLOAT64: dict[str, Any] = {"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}


def loss(out: TokenOutputs, batch: Batch) -> Tensor:
    return -(out.logprobs * batch["advantages"] * batch["loss_mask"]).sum()


NO_EXPERTS = {"n_groups": 4, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
"""A Nemotron-H that can be split over ranks."""


def expected(path: str, case: str) -> tuple[Any, list[Tensor]]:
    def compute() -> tuple[Any, list[Tensor]]:
        reference, batch = Reference(path), samples(CASES[case])
        logprobs = reference.forward(batch, ("logprobs",))["logprobs"]
        reference.step(batch, loss, lambda batch: batch["loss_mask"].sum(), divide_by=1.0)
        return gradients_as_in_files(reference.model), logprobs

    return cached("recurrent", (path, case), compute)


def check(
    family: str, backend: str, case: str = "ragged", changes: dict[str, Any] | None = None, **options: Any
) -> None:
    """Compare the log-probs and all gradients of an engine with the reference."""
    path = family_dir(family, **(changes or {}))
    gradients, logprobs = expected(path, case)
    options = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=72), **FLOAT64, **options}
    # Small chunks, so that sequences cross the borders of many.
    sizes = {"_LARGEST_CHUNK": 8, "_CHUNKS": {"mamba_selective_scan": 1}}
    with (
        mock.patch.multiple(functions, **sizes),
        float64_everywhere(),
        started(backend, path=path, **options) as engine,
    ):
        assert not engine._components.rows
        everything = samples(CASES[case])
        local = list(range(len(everything)))[engine.dp_rank :: engine.dp_size]
        batch = [everything[i] for i in local]
        out = engine.forward_batch(batch)
        engine.forward_backward(batch, loss, normalization="sum")
        of_rows = assert_rows(out, logprobs, local, 1e-10)
        error = assert_tensors(gradients_of(engine).items(), gradients, 1e-10)
    record("recurrent layers: log-probs, gradients", f"{family} {backend}", error=f"{of_rows:.0e} {error:.0e}")


WAYS = {
    "c2-ulysses": {"fsdp": {"context_parallel": "ulysses"}},
    "c2-gather_kv": {"fsdp": {"context_parallel": "gather_kv"}},
    "d2": {},
    "p2": {},
    "d1-shared": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=72, share_prefixes=True)},
    "c2-shared": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=72, share_prefixes=True)},
    "d1-full": {"activation_checkpointing": "full"},
    "p2-full": {"activation_checkpointing": "full"},
    "d1-selective": {"activation_checkpointing": "selective"},
}
"""Options of an engine by its layout and what they do."""


def marked(way: str) -> Any:
    world = ParallelDims.parse(f"fsdp:{way.partition('-')[0]}").world_size
    return pytest.param(way, marks=pytest.mark.world(world))


@pytest.mark.parametrize("way", [marked(way) for way in WAYS])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2", "zamba2"])
def test_layouts_compute_the_same(family: str, way: str) -> None:
    if family == "zamba2" and way.startswith("p2"):
        pytest.skip("its decoder is no chain of layers, and is refused")
    layout = way.partition("-")[0]
    check(family, f"fsdp:{layout}", "family" if "shared" in way else "ragged", **WAYS[way])


@pytest.mark.parametrize("way", [marked("c2-ulysses"), marked("c2-gather_kv")])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_models_without_attention_are_split(family: str, way: str) -> None:
    check(family, "fsdp:c2", **WAYS[way])


@pytest.mark.parametrize("way", [marked(way) for way in ("d2", "p2", "d1-full", "p2-full", "d1-selective")])
@pytest.mark.parametrize("family", ["minimax", "recurrent_gemma"])
def test_layouts_of_layers_with_rows_compute_the_same(family: str, way: str) -> None:
    if family == "recurrent_gemma" and way.startswith("p2"):
        pytest.skip("it has a head of its own, and is refused")
    check(family, f"fsdp:{way.partition('-')[0]}", **WAYS[way])


SPLIT = {
    "t2": {},
    "t2-shared": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=72, share_prefixes=True)},
    "t2-full": {"activation_checkpointing": "full"},
    "p2t2": {},
    "c2t2": {"fsdp": {"context_parallel": "ulysses"}},
    "d2t2": {},
}
"""Options of an engine by its tensor-parallel layout and what they do."""


@pytest.mark.parametrize("way", [marked(way) for way in SPLIT])
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_tensor_parallel_ranks_compute_the_same(family: str, way: str) -> None:
    changes = NO_EXPERTS if family == "nemotron_h" else None
    check(
        family,
        f"fsdp:{way.partition('-')[0]}",
        "family" if "shared" in way else "ragged",
        changes=changes,
        **SPLIT[way],
    )


@pytest.mark.world(1)
@pytest.mark.parametrize("family", sorted(RECURRENT_FAMILIES))
def test_packed_sequences_are_those_of_transformers(family: str) -> None:
    check(family, "fsdp:d1")


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("family", "changes"), [("rwkv", {"rescale_every": 1}), ("xlstm", {"max_inference_chunksize": 28})]
)
def test_decoders_in_evaluation_mode_get_whole_streams_and_keep_weights(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """transformers divides weights of RWKV in place, and cuts the input of xLSTM after some tokens. Settings are saved as they were."""
    path = family_dir(family, **changes)
    batch = [{"input_ids": torch.arange(n) % 60 + 3} for n in (20, 1, 22)]
    with started("fsdp:d1", path=path) as engine:
        assert not engine._components.rows
        alone = engine.forward_batch(batch, mb_spec=MicroBatchSpec(samples_per_mb=1))
        together = engine.forward_batch(batch, mb_spec=MicroBatchSpec())
        engine.save(SaveLoadMeta(tmp_path / "saved"))
    torch.testing.assert_close(together, alone)
    on_disk, saved = (load_file(Path(folder) / "model.safetensors") for folder in (path, tmp_path / "saved"))
    assert same_bits(saved, on_disk)
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert changes.items() <= settings.items()


@pytest.mark.world(1)
@pytest.mark.parametrize("family", ["rwkv", "lfm2"])
def test_micro_batches_of_another_model_get_layouts_of_this_one(family: str) -> None:
    """Micro-batches of a dense model have no chunks: layers with rows would take the whole stream for one sequence."""
    with started("fsdp:d1", path=family_dir("qwen3")) as dense:
        mbs = dense.microbatches(samples(CASES["ragged"]))

    def logprobs(engine: Any, mbs: Any) -> Tensor:
        rows = engine.forward_backward_batch(mbs, lambda out, mb: (None, out.logprobs), forward_only=True)
        return torch.cat(mbs.restore(rows))

    with started("fsdp:d1", path=family_dir(family)) as engine:
        expected = logprobs(engine, engine.microbatches(samples(CASES["ragged"])))
        assert torch.equal(logprobs(engine, mbs), expected)


def test_layers_with_rows_refuse_streams_without_chunks() -> None:
    model = AutoModelForCausalLM.from_config(RECURRENT_FAMILIES["rwkv"]())
    run_in_rows(model)
    layout = ContextParallel(None).layout(TokenStream.of((3, 2), 5))
    with functions.running(layout), pytest.raises(ValueError, match=r"RwkvBlock: the layout .* for a model without it"):
        model(input_ids=torch.arange(5)[None])


LORA = LoRAConfig(rank=3, alpha=5.0, target_modules=["in_proj", "in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj"])


@pytest.mark.parametrize("way", [marked("d1"), marked("c2"), marked("p2-full")])
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_adapters_of_recurrent_layers(family: str, way: str) -> None:
    path = family_dir(family)
    with writing():
        adapter = adapter_dir(path, LORA)
    batch, options = samples(CASES["ragged"]), {**FLOAT64, **WAYS.get(way, {}), "lora": LORA}
    expected = Reference(path, adapter=adapter).step(batch, loss, lambda batch: batch["loss_mask"].sum(), divide_by=1.0)
    with float64_everywhere(), started(f"fsdp:{way[:2]}", path=path, **options) as engine:
        engine.adapters.load(engine.adapters.selected, adapter)
        engine.forward_backward(batch, loss, normalization="sum")
        error = assert_tensors(gradients_of(engine).items(), expected.gradients, 1e-10)
    record("recurrent layers: gradients of adapters", f"{family} {way}", error=f"{error:.0e}")


@pytest.mark.world(2)
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_adapters_of_layers_that_ranks_split(family: str) -> None:
    """Their factors follow the rows that a rank computes of a weight with several matrices."""
    path = family_dir(family, **(NO_EXPERTS if family == "nemotron_h" else {}))
    lora = LoRAConfig(rank=3, target_modules=["in_proj", "in_proj_qkv", "in_proj_z", "q_proj", "k_proj", "o_proj"])
    with writing():
        adapter = adapter_dir(path, lora)
    batch = samples(CASES["ragged"])
    expected = Reference(path, adapter=adapter).step(batch, loss, lambda batch: batch["loss_mask"].sum(), divide_by=1.0)
    with float64_everywhere(), started("fsdp:t2", path=path, lora=lora, **FLOAT64) as engine:
        engine.adapters.load(engine.adapters.selected, adapter)
        engine.forward_backward(batch, loss, normalization="sum")
        error = assert_tensors(gradients_of(engine).items(), expected.gradients, 1e-10)
    record("recurrent layers: gradients of adapters", f"{family} t2", error=f"{error:.0e}")


@pytest.mark.world(2)
@pytest.mark.parametrize(("family", "changes"), [("qwen3_5_text", {}), ("nemotron_h", NO_EXPERTS), ("lfm2", {})])
def test_split_layers_save_what_they_loaded(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = family_dir(family, **changes)
    on_disk = load_file(Path(path) / "model.safetensors")
    with started("fsdp:t2", path=path) as engine:
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), on_disk)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("family", "has", "has_not"),
    [
        ("qwen3_5_text", {"in_proj_qkv", "out_proj", "gate_proj"}, set()),
        ("nemotron_h", {"in_proj", "q_proj"}, {"out_proj"}),
    ],
)
def test_all_linear_is_what_peft_supports(family: str, has: set[str], has_not: set[str]) -> None:
    """The kernel of a convolution is no stacked expert, and peft refuses the last layer of Mamba's mixers."""
    plan = plan_adapter(RECURRENT_FAMILIES[family](), LoRAConfig(rank=2))
    names = {target.key.rpartition(".")[2] for target in plan.targets}
    assert has <= names
    assert not has_not & names


@pytest.mark.parametrize("way", [marked("d1-full"), marked("p2-full")])
def test_every_layer_calls_the_packed_functions_again_when_it_is_recomputed(way: str) -> None:
    """A layer that called the functions of transformers would still run."""
    calls: Counter[tuple[str, bool]] = Counter()

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls[self.__name__, functions._running.get() is not None] += 1
        return call(self, *args, **options)

    path = family_dir("qwen3_next")
    batch = samples(CASES["ragged"])
    spec = MicroBatchSpec(max_tokens_per_mb=72)
    with started(f"fsdp:{way[:2]}", path=path, mb_spec=spec, **WAYS[way]) as engine:
        call = functions._Replaced.__call__
        with mock.patch.object(functions._Replaced, "__call__", counted):
            engine.train_batch(batch, loss)
        # Once in the forward and once in the backward of a micro-batch, in each layer of this stage with linear attention.
        layers = sum(isinstance(module, torch.nn.Conv1d) for module in engine._components.model.modules())
        times = 2 * layers * len(engine.microbatches(batch))
    assert layers == 2 or way.startswith("p2")  # the second stage has layers of attention
    assert calls == Counter({("causal_conv1d_fn", True): times, ("torch_chunk_gated_delta_rule", True): times})


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("family", "backend", "changes", "message"),
    [
        ("zamba2", "fsdp:p2", {}, "'zamba2' cannot be cut into pipeline stages.*its input beside the hidden states"),
        ("qwen3_next", "fsdp:t2", {}, "'qwen3_next' has no tensor-parallel plan on the fsdp engine"),
        (
            "qwen3_next",
            "fsdp:c2",
            {"linear_num_value_heads": 3, "linear_num_key_heads": 3},
            "3 heads.*do not divide over 2",
        ),
        ("nemotron_h", "fsdp:t2", {}, "layers_block_type of 'nemotron_h' has 'moe'.*leave t out"),
        ("nemotron_h", "fsdp:t2", {**NO_EXPERTS, "n_groups": 1}, "n_groups = 1 does not divide over 2"),
        ("qwen3_5_text", "fsdp:t2", {"linear_num_key_heads": 1}, "linear_num_key_heads = 1 does not divide over 2"),
        ("minimax", "fsdp:c2", {}, "'minimax': in its recurrent layers each sequence is a row.*leave c out"),
        ("qwen3_next", "megatron:d2", {}, "qwen3_next"),
    ],
    ids=["chain", "tensor", "heads", "experts", "groups", "key heads", "rows", "megatron"],
)
def test_layouts_that_cannot_carry_the_state_are_refused(
    family: str, backend: str, changes: dict[str, Any], message: str
) -> None:
    path = family_dir(family, **changes)
    with pytest.raises(ValueError, match=message), started(backend, path=path):
        raise AssertionError("not reached")


@pytest.mark.world(1)
def test_layers_with_rows_share_no_prefixes() -> None:
    path, shared = family_dir("minimax"), MicroBatchSpec(share_prefixes=True)
    message = r"share_prefixes = True.*one sequence per row"
    with pytest.raises(ValueError, match=message), started("fsdp:d1", path=path, mb_spec=shared):
        raise AssertionError("not reached")
    with started("fsdp:d1", path=path) as engine, pytest.raises(ValueError, match=message):
        engine.forward_batch(samples(CASES["ragged"]), mb_spec=shared)
