"""The section of the JAX engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal.api.sections.backend import BackendConfig

if TYPE_CHECKING:
    from areal.api.config import TrainEngineConfig


class JAXConfig(BackendConfig):
    """Section of the JAX engine."""

    devices_per_process: int = Field(
        default=1,
        gt=0,
        description="Devices of each process, all of which it uses: ranks of the layout. On CPUs, JAX starts so many of them.",
    )
    coordinator: str | None = Field(
        default=None, description="`host:port` of JAX's coordinator; None takes a free port of the first rank's host."
    )
    compilation_cache: str | None = Field(
        default=None,
        description="Directory in which compiled programs are kept for later starts; None leaves JAX's own setting.",
    )
    attention_kernel: bool = Field(
        default=True,
        description="Compute attention with the kernel of the platform, where it has one for the model; False computes blocks everywhere.",
    )

    def check_combination(self, config: TrainEngineConfig) -> None:
        """Refuse values that the engine does not have."""
        if config.activation_checkpointing == "selective":
            raise ValueError(
                "activation_checkpointing = 'selective': the JAX engine has 'none' and 'full', which recomputes layers"
            )
