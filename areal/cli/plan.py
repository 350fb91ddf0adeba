"""`areal plan`: memory, communication and time of a layout that does not exist yet, and the best layouts."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from areal.api.parallel import ParallelDims
from areal.cli.run_recipe import read_settings
from areal.engine.model.hub import read_config
from areal.plan.hardware import Hardware
from areal.plan.layout_search import PlanJob, best_layouts, with_world_size
from areal.plan.report import describe_layouts, describe_plan
from areal.plan.trace import check_engine
from areal.utils import platform

_WORLDS = (64, 128, 256, 512, 1024, 2048, 4096)


def run_plan(options: Sequence[str]) -> int:
    """Print a plan. Returns the exit code: 1 if the plan is refused."""
    given, rest = _parser().parse_known_args(options)
    warnings.simplefilter("ignore")  # of libraries
    log = logging.getLogger("areal")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        _check_sizes(given)
        hardware = Hardware(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Hardware)})
        job = PlanJob(
            given.model,
            given.tokens_per_rank,
            given.sequence,
            int(given.memory * 2**30),
            hardware,
            read_settings(rest),
            given.micro_batch,
            given.servers,
        )
        _print_plan(job, given)
    except ValueError as error:
        print(f"areal plan: {error}", file=sys.stderr)
        return 1
    finally:
        log.setLevel(level)
    return 0


def _check_sizes(given: argparse.Namespace) -> None:
    """Raise unless sizes and rates are above 0, and times at least that."""
    for name in (*_SIZES, *_RATES):
        value, may_be_zero = getattr(given, name), name in _MAY_BE_ZERO
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            least = "at least 0" if may_be_zero else "above 0"
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: it must be finite and {least}")


def _print_plan(job: PlanJob, given: argparse.Namespace) -> None:
    engine, _, letters = given.backend.partition(":")
    if engine == "jax":
        _print_compiled(job, given)
        return
    check_engine(given.backend)
    if given.topology is not None:
        raise ValueError(f"--topology {given.topology} with backend = {given.backend!r}: it is for jax; leave it out")
    if given.world_size is None:
        raise ValueError(f"--world-size is missing with backend = {given.backend!r}: name the number of ranks")
    config = read_config(job.model)
    dims = with_world_size(ParallelDims.parse(given.backend), given.world_size) if letters else None
    print(
        f"{config.model_type} at {job.model}: {given.world_size:,} ranks, {job.tokens_per_rank:,} tokens per rank and step in sequences of "
        f"{job.length:,}\n{job.hardware.describe()}\n"
    )
    layers = job.uniform_layers()
    # The layout that was asked for, with all of its layers.
    if dims is not None:
        print(describe_plan(job.plan(dims), job) + "\n", flush=True)
    # Other layouts, from models of few layers where layers are alike.
    if given.layouts or dims is None:
        best = best_layouts(job, engine, given.world_size, layers, _progress())
        print(describe_layouts(best, given.layouts or 1), flush=True)
        if dims is None and best:
            dims = best[0].config.dims
            job = dataclasses.replace(
                job,
                settings={**job.settings, "activation_checkpointing": best[0].config.activation_checkpointing},
                micro_batch=best[0].workload.micro_batch,
            )
            print("\n" + describe_plan(job.plan(dims), job), flush=True)
    if given.picture is not None and dims is not None:
        worlds, base = picture_worlds(dims), dataclasses.replace(dims, dp_shard=1, ep=1)
        plans = [job.plan(dataclasses.replace(with_world_size(base, world), ep=dims.ep), layers) for world in worlds]
        title = f"{Path(job.model).name}, {dims} and more data-parallel ranks: predicted"
        import_module("areal.plan.scaling_picture").save_scaling(plans, given.picture, title)
        print(f"\nweak scaling from {worlds[0]} to {worlds[-1]} ranks: {given.picture}")


def _print_compiled(job: PlanJob, given: argparse.Namespace) -> None:
    """Print a plan of the JAX engine: one layout, on the devices of a topology."""
    if ":" not in given.backend or given.topology is None or given.picture is not None:
        raise ValueError(
            f"backend = {given.backend!r} with --topology {given.topology}: a plan of the JAX engine needs a layout and a topology, such as "
            "jax:d2t2 and v5p:2x2x1, and has no --picture"
        )
    platform.leave_tpu_alone()
    try:
        devices = import_module("areal.engine.jax.ahead.devices").planned_devices(given.topology)
        compiled = import_module("areal.plan.compiled_plan")
    except ImportError as error:
        raise ValueError(f"backend = {given.backend!r} ({error}): pip install 'areal[jax]'") from error
    if given.world_size not in (None, len(devices)):
        raise ValueError(
            f"--world-size {given.world_size} with --topology {given.topology}, which has {len(devices)} devices: leave --world-size out"
        )
    dims = with_world_size(ParallelDims.parse(given.backend), len(devices))
    workload = job.workload(dims)
    plan = compiled.plan_compiled(job.config(dims, workload), workload, devices)
    print(compiled.describe_compiled(plan, job.memory))


def picture_worlds(dims: ParallelDims) -> list[int]:
    """Return the sizes of the worlds of the picture: those that the layout's degrees, except ``d``, divide.

    Raises:
        ValueError: there are none.
    """
    least = dims.world_size // dims.dp_shard
    worlds = [world for world in _WORLDS if world % least == 0 and (world // least * dims.cp) % dims.ep == 0]
    if not worlds:
        raise ValueError(
            f"--picture with backend = '{dims}': its degrees divide no power of two from {_WORLDS[0]} to {_WORLDS[-1]} ranks; leave "
            "--picture out, or choose others"
        )
    return worlds


def _progress() -> Callable[[str], None]:
    """Return a function that shows progress on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal plan",
        description="Plan a layout without its ranks: memory, communication and time of a step.",
        epilog="key=value sets a field of the engine's configuration, such as activation_checkpointing=full.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="model directory or hub name; only config.json is read")
    parser.add_argument(
        "--backend", default="fsdp", help="engine with a layout, such as fsdp:t8p2 or megatron:t8, or alone"
    )
    parser.add_argument("--world-size", type=int, help="number of ranks; d of the layout is multiplied")
    parser.add_argument("--topology", help="devices of a jax layout: TPU chips such as v5p:2x2x1, or cpu:N")
    parser.add_argument("--tokens-per-rank", type=int, default=8192, help="tokens of a step divided by the ranks")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument(
        "--micro-batch", type=int, help="tokens of a micro-batch of a data-parallel rank; chosen if left out"
    )
    parser.add_argument("--memory", type=float, default=80.0, help="GiB of a rank's device")
    parser.add_argument("--servers", type=int, default=1, help="number of inference servers of an update")
    parser.add_argument("--layouts", type=int, default=5, help="number of best layouts to print; 0 does not search")
    parser.add_argument("--picture", type=Path, help="file for a plot of weak scaling from 64 to 4,096 ranks")
    for field in dataclasses.fields(Hardware):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help=_RATES[field.name])
    return parser


_SIZES = ("world_size", "tokens_per_rank", "sequence", "micro_batch", "memory", "servers")
_MAY_BE_ZERO = ("latency_us", "launch_us")
_RATES = {
    "tflops": "TFLOP/s of matrix products",
    "memory_gbps": "GB/s of the device's memory",
    "node_gbps": "GB/s of a rank to its node",
    "network_gbps": "GB/s of a rank to other nodes",
    "ranks_per_node": "ranks on a node",
    "latency_us": "microseconds for each doubling of a collective's ranks",
    "launch_us": "least microseconds of an operation",
}
