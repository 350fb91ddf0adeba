"""The compiled programs of an engine: their collectives, and what is kept between forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from areal.api import TrainEngine
from areal.engine.jax import bridge
from areal.plan.compiled_collectives import CompiledCollective, collectives
from areal.tests.harness.tiny import global_batch, local_batch, loss


def compiled(engine: TrainEngine) -> tuple[dict[str, list[CompiledCollective]], list[jax.Array]]:
    """Run a forward, and a forward with a backward. Returns the collectives of the programs by function, and the residuals."""
    found: dict[str, list[CompiledCollective]] = {}
    residuals: list[jax.Array] = []

    def recording(name: str, program: Any) -> Any:
        def run(*args: Any) -> Any:
            found[name] = collectives(program.lower(*args).compile().as_text())
            result = program(*args)
            if name == "_forward" and not residuals:  # those of the first micro-batch
                residuals.extend(result[-1].leaves)
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_evaluate", "_forward", "_pull"):
            patch.setattr(bridge, name, recording(name, getattr(bridge, name)))
        batch = local_batch(engine, global_batch())
        engine.forward_batch(batch)
        engine.forward_backward(batch, loss)
    return found, residuals
