"""Configuration of the backend in SkyRL: the content of ``--backend-config``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from areal.api.sections.strict import StrictConfig


class ArealBackendConfig(StrictConfig):
    """Settings of :class:`~areal.integrations.skyrl.backend.ArealBackend`, with the names of the options of ``areal serve``.

    Attributes:
        backend: engine and layout, such as ``"fsdp:d2"``.
        backend_config: fields of :class:`~areal.tinker.backends.training.engine_config.EngineBackendConfig`.
        sampler: ``"local"`` or ``"vllm"``. With ``None``, requests for samples are refused, and no model is loaded for them.
        sampler_config: settings of the sampler, such as ``{"url": "http://127.0.0.1:8100"}`` of ``"vllm"``.
    """

    backend: str = "fsdp:d1"
    backend_config: dict[str, Any] = Field(default={})
    sampler: str | None = None
    sampler_config: dict[str, Any] = Field(default={})
