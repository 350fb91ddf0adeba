"""Configuration of the backend in SkyRL: the content of ``--backend-config``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from areal.api.config_sections import StrictConfig


class ArealBackendConfig(StrictConfig):
    """Settings of :class:`~areal.integrations.skyrl.backend.ArealBackend`, with the names of the options of ``areal serve``."""

    backend: str = Field(default="fsdp:d1", description="Engine and layout, such as 'fsdp:d2'.")
    backend_config: dict[str, Any] = Field(
        default={}, description="Fields of `areal.tinker.backends.training.engine_config.EngineBackendConfig`."
    )
    sampler: str | None = Field(
        default=None, description="'local' or 'vllm'. None: requests for samples are refused, and no model is loaded."
    )
    sampler_config: dict[str, Any] = Field(
        default={}, description="Settings of the sampler, such as {'url': 'http://127.0.0.1:8100'} of 'vllm'."
    )
