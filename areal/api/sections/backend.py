"""The base class of the section of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.api.sections.strict import StrictConfig

if TYPE_CHECKING:
    from areal.api.config import TrainEngineConfig


class BackendConfig(StrictConfig):
    """Base class of the section of one engine, which the engine class names in ``config_class``.

    The section has the name of the engine: ``TrainEngineConfig(backend="mine:d1", mine={...})``. This class is the section of an engine
    without options: it accepts no field.
    """

    def check_combination(self, config: TrainEngineConfig) -> None:
        """Check this section against the other fields of the configuration. Called only if ``backend`` names this section's engine.

        Raises:
            ValueError: the engine cannot honour a combination; names both fields and the way out.
        """


NARROW_MOMENTS_OF_ADAPTERS = (
    "optimizer_state_dtype = 'bfloat16' with lora: the moments of adapters are float32; leave it out"
)
