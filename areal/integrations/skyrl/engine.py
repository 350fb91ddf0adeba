"""SkyRL's engine process with the backend: ``python -m areal.integrations.skyrl.engine``, with the options of SkyRL's."""

from __future__ import annotations

from typing import Any

from skyrl.tinker import engine

from areal.integrations.skyrl.backend import ArealBackend
from areal.integrations.skyrl.config import ArealBackendConfig

NAME = "areal"
"""Value of SkyRL's option ``--backend``."""


def register() -> None:
    """Let SkyRL's engine find the backend under its name, in this process. Replaces the function that knows the backends."""
    original = engine.get_backend_classes

    def get_backend_classes(backend_name: str, use_ray: bool = False) -> tuple[Any, Any]:
        if backend_name == NAME:
            return ArealBackend, ArealBackendConfig
        return original(backend_name, use_ray=use_ray)

    engine.get_backend_classes = get_backend_classes


if __name__ == "__main__":
    register()
    engine.main()
