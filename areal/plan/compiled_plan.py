"""Plan of a step of the JAX engine: what the compiler says about the memory and the collectives of its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api import TrainEngineConfig
from areal.engine.jax.ahead.programs import Programs, device_bytes
from areal.engine.jax.engine import JAXEngine
from areal.plan.compiled_collectives import step_collectives
from areal.plan.report import COLLECTIVE_HEAD, describe_collective, memory_table
from areal.plan.step_recorder import Collective, CollectiveCalls
from areal.plan.trace import Workload


@dataclass(frozen=True)
class CompiledPlan:
    """A step of a layout.

    Attributes:
        config: configuration of the engine.
        workload: batch of a data-parallel rank.
        n_mbs: number of micro-batches.
        device: kind of the devices.
        program: name of the program with the largest memory.
        memory: bytes of a device by kind while that program runs.
        collectives: calls and bytes by kind.
    """

    config: TrainEngineConfig
    workload: Workload
    n_mbs: int
    device: str
    program: str
    memory: Mapping[str, int]
    collectives: Mapping[Collective, CollectiveCalls]


def plan_compiled(config: TrainEngineConfig, workload: Workload, devices: Sequence[Any]) -> CompiledPlan:
    """Compile the programs of a step, and read their memory and collectives.

    Args:
        config: configuration of the engine, with as many ranks as devices.
        devices: of any platform; they need not be there.

    Raises:
        ValueError: the engine refuses the model or the layout, or the plan an option.
    """
    if config.lora is not None:
        raise ValueError(f"lora = {config.lora!r}: a plan of the JAX engine does not support it; leave it out")
    optimizer = config.optimizer
    if optimizer is None:
        raise ValueError("optimizer = None: a plan of the JAX engine is one of a training step; set an optimizer")
    # The engine refuses layouts and options that it does not support.
    config = JAXEngine(config).config
    n_mbs = -(-workload.sequences // workload.sequences_at_once)
    programs = Programs.of(config, devices, workload.sequences_at_once * workload.length)
    forward, backward, residuals = programs.forward_and_backward()
    compiled = {"forward": forward, "backward": backward, "update": programs.update(optimizer)}
    # Arrays that exist while each program runs. Some are its arguments, and a donated argument is a result, too.
    parameters, kept = device_bytes(programs.params), device_bytes(residuals)
    state = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": device_bytes(programs.moments(optimizer)),
    }
    before = state if n_mbs > 1 else {**state, "gradients": 0}
    passes = {
        "forward": ({**before, "residuals": kept}, ("parameters", "residuals")),
        "backward": ({**state, "residuals": kept}, ("parameters", "gradients", "residuals")),
        "update": ({**state, "residuals": 0}, ("parameters", "gradients", "optimizer")),
    }
    code = sum(program.memory_analysis().generated_code_size_in_bytes for program in compiled.values())
    memory = {}
    for name, (arrays, known) in passes.items():
        temporaries = _total(compiled[name]) - sum(arrays[kind] for kind in known)
        memory[name] = {**arrays, "temporaries": temporaries, "programs": code}
    largest = max(memory, key=lambda name: sum(memory[name].values()))
    runs = {"forward": n_mbs, "backward": n_mbs, "update": 1}
    texts = {program.as_text(): runs[name] for name, program in compiled.items()}
    collectives = step_collectives(texts, programs.spec.mesh.shape)
    return CompiledPlan(config, workload, n_mbs, devices[0].device_kind, largest, memory[largest], collectives)


def describe_compiled(plan: CompiledPlan, memory: int) -> str:
    """Return the memory and the collectives of a step, on several lines.

    Args:
        memory: bytes of a device.
    """
    config = plan.config
    rows = [
        f"{row}{calls.count:9.0f}{calls.nbytes / 2**30:11.3f}"
        for row, calls in sorted(
            ((describe_collective(kind), calls) for kind, calls in plan.collectives.items()), key=lambda x: -x[1].nbytes
        )
    ]
    return "\n".join(
        (
            f"{config.backend} on {plan.device}, activation_checkpointing = {config.activation_checkpointing}, {plan.n_mbs} micro-batches of "
            f"{plan.workload.sequences_at_once * plan.workload.length:,} tokens",
            "",
            f"memory of a device during the {plan.program}, GiB",
            *memory_table(plan.memory, memory),
            "",
            "collectives of a step on a device",
            f"{COLLECTIVE_HEAD}{'calls':>9}{'GiB':>11}",
            *rows,
        )
    )


def _total(program: Any) -> int:
    """Return the bytes of a program on a device: arguments, results that do not take the memory of one, and temporary memory."""
    stats = program.memory_analysis()
    results: int = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.argument_size_in_bytes) + results + int(stats.temp_size_in_bytes)
