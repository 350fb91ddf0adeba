"""Public interface: configurations, dataclasses, protocols and the engine interface."""

from areal.api.adapters import Adapters
from areal.api.arguments import BatchInput, Outputs, default_loss_weight
from areal.api.batch import (
    IGNORE_INDEX,
    Batch,
    Metric,
    OptimStats,
    OutputName,
    Reduction,
    StepOutput,
    TokenOutputs,
    TopK,
    TopKOutput,
)
from areal.api.checkpoint import Checkpointer, SaveLoadMeta, Stateful
from areal.api.config import FinetuneSpec, TrainEngineConfig
from areal.api.control import Control
from areal.api.engine import TrainEngine
from areal.api.loss import LossFn, LossObjective, LossTerms, LossWeightFn, Normalization, ProcessOutputFn
from areal.api.memory import EngineMemory, KindMemory
from areal.api.microbatch import BatchForm, MicroBatch, MicroBatchList, PrefixTree
from areal.api.parallel import MESH_AXES, ParallelDims
from areal.api.pending import Finished, Pending
from areal.api.sections.backend import BackendConfig
from areal.api.sections.experts import MoEConfig
from areal.api.sections.float8 import Float8Config
from areal.api.sections.fsdp import FSDPConfig
from areal.api.sections.jax import JAXConfig
from areal.api.sections.lora import LoRAConfig
from areal.api.sections.megatron import MegatronConfig
from areal.api.sections.microbatch import MicroBatchSpec
from areal.api.sections.optimizer import MuonConfig, OptimizerConfig
from areal.api.sections.quantization import QuantizationConfig
from areal.api.step_settings import ParamGroup, StepSettings
from areal.api.weights import (
    LocalTensor,
    NamedTensor,
    SelectName,
    TensorSource,
    UpdateKind,
    WeightReceiver,
    WeightSource,
    WeightTransport,
    WeightUpdateMeta,
)

__all__ = [
    "IGNORE_INDEX",
    "MESH_AXES",
    "Adapters",
    "BackendConfig",
    "Batch",
    "BatchForm",
    "BatchInput",
    "Checkpointer",
    "Control",
    "EngineMemory",
    "FSDPConfig",
    "FinetuneSpec",
    "Finished",
    "Float8Config",
    "JAXConfig",
    "KindMemory",
    "LoRAConfig",
    "LocalTensor",
    "LossFn",
    "LossObjective",
    "LossTerms",
    "LossWeightFn",
    "MegatronConfig",
    "Metric",
    "MicroBatch",
    "MicroBatchList",
    "MicroBatchSpec",
    "MoEConfig",
    "MuonConfig",
    "NamedTensor",
    "Normalization",
    "OptimStats",
    "OptimizerConfig",
    "OutputName",
    "Outputs",
    "ParallelDims",
    "ParamGroup",
    "Pending",
    "PrefixTree",
    "ProcessOutputFn",
    "QuantizationConfig",
    "Reduction",
    "SaveLoadMeta",
    "SelectName",
    "Stateful",
    "StepOutput",
    "StepSettings",
    "TensorSource",
    "TokenOutputs",
    "TopK",
    "TopKOutput",
    "TrainEngine",
    "TrainEngineConfig",
    "UpdateKind",
    "WeightReceiver",
    "WeightSource",
    "WeightTransport",
    "WeightUpdateMeta",
    "default_loss_weight",
]
