"""All bugs that the suite must catch, for every installed engine."""

from __future__ import annotations

from importlib.util import find_spec

import areal.tests.mutants.bugs.calls
import areal.tests.mutants.bugs.costs
import areal.tests.mutants.bugs.dispatch
import areal.tests.mutants.bugs.empty_ranks
import areal.tests.mutants.bugs.faults
import areal.tests.mutants.bugs.kernels.attention
import areal.tests.mutants.bugs.kernels.head
import areal.tests.mutants.bugs.kernels.invariance
import areal.tests.mutants.bugs.lora
import areal.tests.mutants.bugs.losses
import areal.tests.mutants.bugs.model.layers
import areal.tests.mutants.bugs.model.muon
import areal.tests.mutants.bugs.model.quantization
import areal.tests.mutants.bugs.parallel
import areal.tests.mutants.bugs.prefixes
import areal.tests.mutants.bugs.rollouts.chat
import areal.tests.mutants.bugs.rollouts.client_processes
import areal.tests.mutants.bugs.rollouts.concurrency
import areal.tests.mutants.bugs.rollouts.episodes
import areal.tests.mutants.bugs.rollouts.gateway
import areal.tests.mutants.bugs.rollouts.image_prompts
import areal.tests.mutants.bugs.rollouts.order
import areal.tests.mutants.bugs.rollouts.recipes
import areal.tests.mutants.bugs.rollouts.rewards
import areal.tests.mutants.bugs.rollouts.rollout
import areal.tests.mutants.bugs.rollouts.server_weights
import areal.tests.mutants.bugs.rollouts.servers
import areal.tests.mutants.bugs.rollouts.sglang
import areal.tests.mutants.bugs.rollouts.stored_samples
import areal.tests.mutants.bugs.shared_devices
import areal.tests.mutants.bugs.silent
import areal.tests.mutants.bugs.step
import areal.tests.mutants.bugs.tinker.backend
import areal.tests.mutants.bugs.tinker.direct
import areal.tests.mutants.bugs.tinker.export
import areal.tests.mutants.bugs.tinker.http
import areal.tests.mutants.bugs.tinker.recovery
import areal.tests.mutants.bugs.tinker.tenants
import areal.tests.mutants.bugs.zoo
from areal.tests.mutants.planting import MUTANTS, plant

if find_spec("megatron") is not None:
    import areal.tests.mutants.bugs.megatron  # after those that it repeats
    import areal.tests.mutants.bugs.model.stages

if find_spec("jax") is not None:
    import areal.tests.mutants.bugs.jax.model
    import areal.tests.mutants.bugs.jax.on_cpu
    import areal.tests.mutants.bugs.jax.plan
    import areal.tests.mutants.bugs.jax.runtime
    import areal.tests.mutants.bugs.jax.state

# After Megatron's, which would repeat them.
import areal.tests.mutants.bugs.gpu
import areal.tests.mutants.bugs.kernels.cpu_products
import areal.tests.mutants.bugs.model.activations
import areal.tests.mutants.bugs.model.bidirectional
import areal.tests.mutants.bugs.model.images
import areal.tests.mutants.bugs.model.liger
import areal.tests.mutants.bugs.model.memory
import areal.tests.mutants.bugs.model.memory_limit
import areal.tests.mutants.bugs.model.plan
import areal.tests.mutants.bugs.model.plan_engines
import areal.tests.mutants.bugs.model.plan_megatron
import areal.tests.mutants.bugs.model.recurrence
import areal.tests.mutants.bugs.rollouts.weight_slices  # noqa: F401


def plant_in_worker(name: str) -> None:
    """Plant a mutant until this process ends."""
    plant(MUTANTS[name])
