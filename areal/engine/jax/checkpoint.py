"""Save and load a JAX model, its optimizer and the state of the run."""

from __future__ import annotations

from areal.engine.checkpoint.checkpointer import EngineCheckpointer


class JAXCheckpointer(EngineCheckpointer):
    """Checkpoints of one JAX engine."""

    engine = "jax"

    def _prepare_dcp(self, files, draft, *, with_optim, asynchronous, about):  # type: ignore[no-untyped-def]
        raise ValueError("weight_format = 'dcp'")

    def _check_dcp(self, path, about, *, with_optim):  # type: ignore[no-untyped-def]
        raise ValueError("weight_format = 'dcp'")
