"""Plans of worlds that do not exist: extrapolation, times of collectives, the search and the command."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from areal.api import FSDPConfig, OptimizerConfig
from areal.api.parallel import ParallelDims
from areal.cli.plan import picture_worlds, run_plan
from areal.engine.model.hub import read_config
from areal.inference.http.group.reshard_plan import HeldPart, plan_resharding
from areal.plan.hardware import Hardware
from areal.plan.layout_plan import Stage, traced_stages
from areal.plan.layout_search import best_layouts, layouts, with_world_size
from areal.plan.report import describe_layouts
from areal.plan.scaling_picture import save_scaling
from areal.plan.server_update import ServerUpdate
from areal.plan.state_bytes import count_parameters, describe_state
from areal.plan.step_recorder import Collective, CollectiveCalls
from areal.plan.trace import Trace
from areal.plan.uniform_layers import UniformLayers
from areal.tests.harness.tiny import NEEDS_CPU, config, family_dir
from areal.tests.harness.world import no_world
from areal.tests.unit.plan.jobs import SETTINGS, job
from areal.utils import platform

STATE = ("parameters", "optimizer")


@pytest.fixture(autouse=True)
def _process_without_a_world() -> Iterator[None]:
    with no_world():
        yield
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "backend",
    ["fsdp:d2t2", "fsdp:d2p2", *(pytest.param(x, marks=NEEDS_CPU) for x in ("megatron:d2t2", "megatron:d2p2"))],
)
def test_few_layers_tell_the_costs_of_all(backend: str) -> None:
    dims = ParallelDims.parse(backend)
    full, short = job().plan(dims), job().plan(dims, UniformLayers.of(job().model))
    for a, b in zip(full.stages, short.stages, strict=True):
        assert counted(a) == counted(b)
        assert a.trace.flops == pytest.approx(b.trace.flops)
        assert a.nbytes == pytest.approx(b.nbytes, rel=0.02)


def counted(stage: Stage) -> dict[Collective, tuple[int, int]]:
    """Return calls and bytes by kind."""
    return {kind: (round(calls.count), round(calls.nbytes)) for kind, calls in stage.trace.collectives.items()}


def test_few_layers_tell_the_costs_of_adapters() -> None:
    adapted = job(settings={**SETTINGS, "lora": {"rank": 4}})
    dims, layers = ParallelDims.parse("fsdp:d2t2"), adapted.uniform_layers()
    full, short = adapted.plan(dims).largest, adapted.plan(dims, layers).largest
    assert layers is not None
    assert counted(full) == counted(short)
    assert {kind: full.trace.memory[kind] for kind in STATE} == {kind: short.trace.memory[kind] for kind in STATE}
    # A pattern may select some of the layers.
    assert job(settings={"lora": {"target_modules": r".*layers\.3\.self_attn\.q_proj"}}).uniform_layers() is None


def test_adapters_are_what_is_trained() -> None:
    dims, batch = ParallelDims.parse("fsdp:d2"), {"tokens_per_rank": 128, "micro_batch": 64}
    trained = job(settings={**SETTINGS, "lora": {"rank": 4}}, **batch).plan(dims).largest
    full = job(**batch).plan(dims).largest
    factors = trained.trace.memory["parameters"] - full.trace.memory["parameters"]
    assert trained.trace.memory["optimizer"] == 2 * factors > 0
    # At the peak, in the second micro-batch, the gradients of the first exist.
    assert trained.trace.memory["gradients"] == factors
    # No gradient of the model is reduced; one all-reduce sums those of the factors, and the step waits for it.
    assert "reduce_scatter" not in {kind.name for kind in trained.trace.collectives}
    assert (
        max(calls.nbytes for kind, calls in trained.trace.collectives.items() if kind.name == "all_reduce") == factors
    )
    assert trained.exposed > 0


def test_recomputation_takes_less_memory_and_more_operations() -> None:
    dims = ParallelDims.parse("fsdp:d64")
    kept = job().plan(dims)
    again = job(settings={**SETTINGS, "activation_checkpointing": "full"}).plan(dims)
    assert again.largest.trace.memory["activations"] < 0.6 * kept.largest.trace.memory["activations"]
    assert again.slowest.trace.flops > 1.1 * kept.slowest.trace.flops


def test_state_is_two_moments_of_the_parameters() -> None:
    memory = job().plan(ParallelDims.parse("fsdp:d2")).largest.trace.memory
    assert memory["optimizer"] == 2 * memory["parameters"] > 0


def test_state_of_a_dry_run_does_not_depend_on_kernels() -> None:
    plain = config("fsdp:d2", path=family_dir("qwen3"))
    others = [{"layer_kernels": "liger"}, {"compile": True}, {"cpu_offload": True}]
    texts = {describe_state(plain.model_copy(update={"fsdp": FSDPConfig(**fields)})) for fields in ({}, *others)}
    assert len(texts) == 1


def test_bubble_is_idle_time_for_each_micro_batch() -> None:
    plan = job(tokens_per_rank=256).plan(ParallelDims.parse("fsdp:d1p2"))
    n_mbs = plan.slowest.trace.n_mbs
    assert plan.bubble == 1 / n_mbs
    assert plan.seconds == pytest.approx(plan.slowest.seconds * (1 + 1 / n_mbs))


def test_stage_with_an_extra_layer_is_the_largest_and_the_slowest() -> None:
    # Of five layers, the second stage has two.
    plan = job(layers=5, length=16, tokens_per_rank=16).plan(ParallelDims.parse("fsdp:d1p4"))
    assert plan.largest.rank == plan.slowest.rank == 1


@pytest.mark.parametrize(
    ("layers", "backend", "settings", "stages"),
    [
        (8, "fsdp:d1", {}, [0]),
        (3, "fsdp:d1p2", {}, [0, 1]),
        (8, "fsdp:d1p8", {}, [0, 1, 4, 7]),
        # One layer more than the 16 chunks of the ranks.
        (17, "fsdp:d1p8v2", {}, [0, 1, 4, 7]),
        (17, "fsdp:d1p8v2", {"fsdp": {"pipeline_layers": (1,) * 13 + (2, 1, 1)}}, [0, 1, 4, 5, 7]),
        (11, "fsdp:d1p6", {"fsdp": {"pipeline_layers": (1, 2, 1, 3, 3, 1)}}, [0, 1, 3, 5]),
        (13, "megatron:d1p6", {"megatron": {"first_stage_layers": 2, "last_stage_layers": 3}}, [0, 1, 3, 5]),
    ],
)
def test_earliest_stage_with_most_layers_is_traced(
    layers: int, backend: str, settings: dict[str, object], stages: list[int]
) -> None:
    planned, dims = job(layers, settings={**SETTINGS, **settings}), ParallelDims.parse(backend)
    assert traced_stages(planned.config(dims, planned.workload(dims))) == stages


def test_search_compares_tokens_per_second() -> None:
    # Of 128 tokens, two ranks with their own batch train one sequence each, and together three.
    planned = job(layers=1, length=40, hardware=Hardware(ranks_per_node=2, latency_us=0.1))
    together, apart = best_layouts(planned, "fsdp", 2, None, str)
    assert (together.config.backend, together.tokens) == ("fsdp:t2", 120)
    assert (apart.config.backend, apart.tokens) == ("fsdp:d2", 80)
    assert apart.seconds < together.seconds
    assert [line.split()[4] for line in describe_layouts([together, apart], 2).splitlines()[2:]] == ["120", "80"]


def test_collectives_of_parameters_overlap_and_others_do_not() -> None:
    hardware = Hardware(node_gbps=1.0, network_gbps=0.25, ranks_per_node=8, latency_us=0.0)
    calls = CollectiveCalls(1, 1e9)
    collectives = {Collective("all_gather", "shards", 8, 1): calls, Collective("all_reduce", "tp", 2, 1): calls}
    stage = Stage.of(0, Trace({}, collectives, 0.0, 0.5, 1), hardware)
    assert (stage.exposed, stage.overlapped) == pytest.approx((1.0, 0.875))
    assert stage.seconds == pytest.approx(1.5)
    # Over several nodes, a group with one rank on each uses one network card, and with two on each, two.
    assert hardware.collective_seconds("all_gather", 1e9, 4, 8) == pytest.approx(0.75 / 0.25)
    assert hardware.collective_seconds("all_gather", 1e9, 4, 4) == pytest.approx(0.75 / 0.5)


@NEEDS_CPU
def test_collectives_of_buffers_overlap_only_if_they_are_set_to() -> None:
    dims = ParallelDims.parse("megatron:d4")
    waits = job(settings={**SETTINGS, "megatron": {"overlap_grad_reduce": False}}).plan(dims).slowest
    reduced = job().plan(dims).slowest
    both = job(settings={**SETTINGS, "megatron": {"overlap_param_gather": True}}).plan(dims).slowest
    assert waits.overlapped == 0 < reduced.overlapped < both.overlapped
    assert waits.exposed > reduced.exposed > both.exposed
    # The buckets and their bytes are the same.
    assert counted(waits) == counted(reduced) == counted(both)


@NEEDS_CPU
def test_experts_of_megatron_get_equally_many_tokens() -> None:
    model = family_dir("qwen3_moe")
    config = read_config(model)
    experts = dataclasses.replace(job(), model=model)
    kept, exchanged = (
        experts.plan(ParallelDims.parse(layout)).largest.trace for layout in ("megatron:d4", "megatron:d2e2")
    )
    assert exchanged.flops == pytest.approx(kept.flops)
    # One sequence of 64 tokens: copies of rows go there and back, forward and backward, and their weights go there, with gradients back.
    (nbytes,) = (calls.nbytes for kind, calls in exchanged.collectives.items() if kind.name == "all_to_all")
    copies = 64 * config.num_experts_per_tok * config.num_hidden_layers
    assert nbytes == copies * 2 * (4 * config.hidden_size + 2)


def test_search_of_megatron_leaves_out_what_it_refuses() -> None:
    # Three stages do not divide eight layers, which models of three and six layers do not show.
    with pytest.raises(ValueError, match="8 layers do not split evenly over 3 stages"):
        job().plan(ParallelDims.parse("megatron:d1p3"), UniformLayers.of(job().model))
    # Stages of another depth are not like the others.
    assert job(settings={"megatron": {"first_stage_layers": 2}}).uniform_layers() is None
    assert job(settings={"fsdp": {"pipeline_layers": (3, 5)}}).uniform_layers() is None
    # There are no groups of replicas.
    found = {str(dims) for engine in ("fsdp", "megatron") for dims in layouts(job(), engine, 128)}
    assert "fsdp:d64r2" in found
    assert "megatron:d128" in found
    assert not [name for name in found if name.startswith("megatron") and "r2" in name]


def test_megatron_is_planned_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "accelerator", lambda: "cuda")
    for backend in ("megatron", "megatron:t2"):
        assert run_plan(["--model", family_dir("qwen3"), "--backend", backend, "--world-size", "4"]) == 1
        assert "set CUDA_VISIBLE_DEVICES=''" in capsys.readouterr().err


def test_layout_fills_the_world() -> None:
    assert str(with_world_size(ParallelDims.parse("fsdp:t8p2"), 1024)) == "fsdp:d64p2t8"
    with pytest.raises(ValueError, match="world_size = 100 with backend"):
        with_world_size(ParallelDims.parse("fsdp:t8"), 100)


def test_command_prints_the_plan_and_the_best_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    model = family_dir("qwen3")
    options = ["--model", model, "--backend", "fsdp:t2", "--world-size", "4", "--sequence", "64"]
    slow = ["--network-gbps", "0.001"]
    slow += ["--servers", "3", "--tokens-per-rank", "64", "--layouts", "2", "dtype=bfloat16"]
    assert run_plan([*options, *slow]) == 0
    # All weights in two bytes, at 1 MB/s. Each of four ranks sends a quarter to each server, and lacks one quarter at most.
    seconds = count_parameters(model) * 2 / 1e6
    text = capsys.readouterr().out
    for words in (
        "fsdp:d2t2, ",
        "assumed: 590 TFLOP/s",
        "peak memory of rank 0",
        "all_gather          shards",
        "layouts that fit",
        "update of 3 servers, ",
        f"sent through the network card of rank 0 in {seconds:.3f} s; with ReshardCarrier 4 ranks send to each server, ",
        f" GiB of a rank in {seconds * 3 / 4:.3f} s, after an exchange of up to ",
        f" GiB of a rank in {seconds / 4:.3f} s\n",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("option", "values"),
    {
        "--servers": ("0",),
        "--world-size": ("0", "-4"),
        "--sequence": ("0",),
        "--tokens-per-rank": ("-64",),
        "--micro-batch": ("0",),
        "--memory": ("0", "nan", "inf"),
        "--tflops": ("0",),
        "--network-gbps": ("-1", "nan"),
        "--ranks-per-node": ("0",),
        "--latency-us": ("-1",),
    }.items(),
)
def test_sizes_and_rates_are_checked(option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for value in values:
        assert run_plan(["--model", family_dir("qwen3"), "--world-size", "4", option, value]) == 1
        assert re.search(rf"{option} {value}: it must be finite and (above|at least) 0", capsys.readouterr().err)


def test_times_may_be_zero(capsys: pytest.CaptureFixture[str]) -> None:
    zero = ["--latency-us", "0", "--launch-us", "0", "--layouts", "0"]
    sizes = ["--backend", "fsdp:d1", "--world-size", "4", "--sequence", "64", "--tokens-per-rank", "64"]
    assert run_plan(["--model", family_dir("qwen3"), *sizes, *zero]) == 0


@pytest.mark.parametrize("servers", [1, 3, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 12, 16, 64])
def test_update_of_servers_costs_what_the_carrier_plans(ranks: int, servers: int) -> None:
    shapes: list[tuple[int, ...]] = [(4096, 512), (1024, 1536), (512,)]

    def held(rank: int) -> list[HeldPart]:
        """Return rows of each tensor, as FSDP divides them."""
        parts = []
        for index, shape in enumerate(shapes):
            rows = -(-shape[0] // ranks)
            start, stop = (min(each * rows, shape[0]) for each in (rank, rank + 1))
            box = ((start, stop, 1), *((0, length, 1) for length in shape[1:]))
            parts.append(HeldPart(str(index), torch.bfloat16, shape, box))
        return parts

    plan = plan_resharding([held(rank) for rank in range(ranks)], servers)
    update = ServerUpdate.of(shapes, 2, ranks, servers)
    traffic = plan.traffic()
    assert (len(plan.groups), max(each.to_servers for each in traffic)) == (update.blocks, update.sent)
    assert max(each.from_ranks for each in traffic) <= update.exchanged


def test_picture_shows_weak_scaling(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plans = [job().plan(with_world_size(ParallelDims.parse("fsdp:t2"), world)) for world in (2, 4)]
    save_scaling(plans, tmp_path / "scaling.svg", "title")
    assert (tmp_path / "scaling.svg").read_text().startswith("<?xml")


def test_command_draws_weak_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, model = tmp_path / "scaling.svg", family_dir("qwen3")
    options = ["--model", model, "--backend", "fsdp:r512t2", "--world-size", "1024", "--tokens-per-rank", "64"]
    assert run_plan([*options, "--sequence", "64", "--layouts", "0", "--picture", str(file)]) == 0
    assert f"weak scaling from 1024 to 4096 ranks: {file}" in capsys.readouterr().out
    # A comment in front of its glyphs has each text: the numbers of ranks come first. Each rate is that of the smallest world, nearly.
    texts = re.findall("<!-- (.*?) -->", file.read_text())
    assert texts[:4] == ["1,024", "2,048", "4,096", "ranks"]
    assert texts[-1] == f"{Path(model).name}, fsdp:r512t2 and more data-parallel ranks: predicted"
    assert len([text for text in texts if text.endswith("%")]) == 3


@pytest.mark.parametrize(
    ("backend", "worlds"),
    [
        ("fsdp:d2t2", [64, 128, 256, 512, 1024, 2048, 4096]),
        ("fsdp:d2r4t8p8", [256, 512, 1024, 2048, 4096]),
        ("fsdp:d512e256", [256, 512, 1024, 2048, 4096]),
        ("fsdp:d256c2t2e256", [512, 1024, 2048, 4096]),
    ],
)
def test_worlds_of_the_picture_are_multiples_of_the_layout(backend: str, worlds: list[int]) -> None:
    assert picture_worlds(ParallelDims.parse(backend)) == worlds


def test_picture_of_a_layout_that_divides_no_world_is_refused() -> None:
    with pytest.raises(ValueError, match="--picture with backend = 'fsdp:d4p3': its degrees divide no power of two"):
        picture_worlds(ParallelDims.parse("fsdp:d4p3"))


def test_muon_computes_whole_matrices() -> None:
    muon = OptimizerConfig(type="muon", lr=1e-3)
    planned, dims = job(layers=2, settings={**SETTINGS, "optimizer": muon}), ParallelDims.parse("fsdp:d1")
    more = planned.plan(dims).slowest.trace.flops - job(layers=2).plan(dims).slowest.trace.flops
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(planned.model))
    shapes = [sorted(x.shape) for name, x in model.named_parameters() if name.endswith("proj.weight")]
    # Each step of Newton and Schulz has two products of the matrix, and one of its smaller side.
    assert more == muon.muon.steps * sum(2 * (2 * small**2 * large + small**3) for small, large in shapes) > 0
    # A rank has some of the matrices, and not of every layer.
    assert planned.uniform_layers() is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--backend", "fsdp:t8"], "does not divide over 8 tensor-parallel ranks"),
        (["--backend", "other:t2"], "there are plans of the engines fsdp, megatron and jax"),
        pytest.param(["--backend", "megatron:t8"], "t8 does not divide the model's", marks=NEEDS_CPU),
        pytest.param(["--backend", "megatron:p4"], "layers do not split", marks=NEEDS_CPU),
        (["--backend", "jax:t2"], "needs a layout and a topology"),
        (["--backend", "fsdp:t2", "--topology", "v5p:2x2x1"], "it is for jax"),
        (["--backend", "fsdp:t2", "--sequence", "4096"], "less than one sequence of 4096"),
        (["--backend", "fsdp:t2", "fsdp.compile=true"], "fsdp.compile = True"),
        (["--backend", "fsdp", "--layouts", "1", "fsdp.compile=true"], "fsdp.compile = True"),
        (["--backend", "fsdp", "--layouts", "1", "fsdp.cpu_offload=true"], "fsdp.cpu_offload = True"),
        (["--backend", "fsdp:t2", "mb_spec.granularity=2"], "set --micro-batch"),
        (["--backend", "fsdp", "--layouts", "1", "path=elsewhere"], "name the model by --model"),
        # A search, of whose layouts each is refused.
        (["--backend", "fsdp", "--layouts", "1", "activation_checkpointing=ful"], "activation_checkpointing"),
        (["--backend", "fsdp", "--layouts", "1", "dtyp=float32"], "dtyp"),
        (["--backend", "fsdp", "--layouts", "1", "--sequence", "65536"], "less than one sequence of 65536"),
        pytest.param(
            ["--backend", "megatron:t2", "optimizer.type=muon"],
            "optimizer.type = 'muon': a plan does not support it; plan 'adamw', or the backend fsdp",
            marks=NEEDS_CPU,
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(options: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", family_dir("qwen3"), "--world-size", "16", "--tokens-per-rank", "64", "--sequence", "64"]
    assert run_plan([*given, "--layouts", "0", *options]) == 1
    assert error in capsys.readouterr().err


@NEEDS_CPU
def test_search_with_a_model_that_no_layout_builds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", family_dir("phi"), "--backend", "megatron"]
    assert run_plan([*model, "--world-size", "4", "--sequence", "64", "--tokens-per-rank", "64"]) == 1
    assert "model_type = 'phi': the Megatron engine builds" in capsys.readouterr().err
