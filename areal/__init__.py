"""Train engines for reinforcement learning: one training step, written once.

The names below are imported when they are first used, so that ``import areal`` stays cheap.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal.name_clash import check_name_clash

if TYPE_CHECKING:
    from areal.api import (
        BackendConfig,
        FinetuneSpec,
        FSDPConfig,
        JAXConfig,
        LoRAConfig,
        MegatronConfig,
        MicroBatchSpec,
        MoEConfig,
        MuonConfig,
        OptimizerConfig,
        ParallelDims,
        SaveLoadMeta,
        TrainEngine,
        TrainEngineConfig,
    )
    from areal.engine.fsdp.engine import FSDPEngine
    from areal.engine.registry import create_engine

check_name_clash(os.path.dirname(os.path.abspath(__file__)), sys.path)

_HOMES = {
    "BackendConfig": "areal.api",
    "FSDPConfig": "areal.api",
    "FSDPEngine": "areal.engine.fsdp.engine",
    "FinetuneSpec": "areal.api",
    "LoRAConfig": "areal.api",
    "JAXConfig": "areal.api",
    "MegatronConfig": "areal.api",
    "MicroBatchSpec": "areal.api",
    "MoEConfig": "areal.api",
    "MuonConfig": "areal.api",
    "OptimizerConfig": "areal.api",
    "ParallelDims": "areal.api",
    "SaveLoadMeta": "areal.api",
    "TrainEngine": "areal.api",
    "TrainEngineConfig": "areal.api",
    "create_engine": "areal.engine.registry",
}

__all__ = [
    "BackendConfig",
    "FSDPConfig",
    "FSDPEngine",
    "FinetuneSpec",
    "JAXConfig",
    "LoRAConfig",
    "MegatronConfig",
    "MicroBatchSpec",
    "MoEConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParallelDims",
    "SaveLoadMeta",
    "TrainEngine",
    "TrainEngineConfig",
    "create_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
