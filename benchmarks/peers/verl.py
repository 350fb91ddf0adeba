"""verl's engine interface, with its FSDP2 engine without padding, and with engines of this library.

verl supports accelerators only; the one addition here is a platform class for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

from benchmarks.peers.workload import peer_workload
from benchmarks.rows import Task


class _CPU(PlatformBase):
    """Platform class for the CPU."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NO_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def cudart(self) -> None:
        return None

    def is_ipc_supported(self) -> bool:
        return False

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_name(self) -> str:
        return "CPU"


set_platform(_CPU())

# These imports read the platform.
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.base import BaseEngine  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

from areal.integrations.verl import ArealEngine, ArealEngineConfig  # noqa: E402


def weighted_nll(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Loss of a micro-batch, in the form that verl's engines ask for."""
    terms = model_output["log_probs"].values() * data["weights"].values()
    return -terms.sum() / data["batch_num_tokens"] * data["dp_size"], {}


class VerlRow:
    """An engine of verl with one batch."""

    can_forward = False

    def __init__(
        self, task: Task, make_engine: Callable[..., BaseEngine], engine_config: Any, **optimizer: Any
    ) -> None:
        workload = peer_workload(task)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.engine = make_engine(
            model_config=HFModelConfig(
                path=task.model,
                load_tokenizer=False,
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=False,
                use_remove_padding=True,
            ),
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(
                lr=task.lr,
                weight_decay=task.weight_decay,
                clip_grad=task.clip,
                total_training_steps=1_000_000,
                lr_warmup_steps=0,
                lr_warmup_steps_ratio=0.0,
                **optimizer,
            ),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        # In verl, a weight is at the token that it trains; here, at the token before it.
        self.tensors = {
            "input_ids": nested(list(workload.input_ids)),
            "position_ids": nested([torch.arange(n) for n in workload.lengths]),
            "loss_mask": nested([trained.roll(1).long() for trained in workload.trained]),
            "weights": nested(list(workload.weights)),
        }
        self.options = {
            "use_remove_padding": True,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": workload.max_tokens_per_mb,
            "temperature": 1.0,
        }

    def step(self) -> tuple[float, float]:
        """See :class:`benchmarks.rows.Row`."""
        batch = tensordict_utils.get_tensordict(self.tensors, self.options)
        with self.engine.train_mode():
            output = self.engine.train_batch(batch, weighted_nll)
            self.engine.lr_scheduler_step()
        return float(sum(output["loss"])), float(output["metrics"]["grad_norm"])

    def forward(self) -> list[Tensor]:
        """Not measured here."""
        raise NotImplementedError("the row of verl takes steps alone")


def build(task: Task, backend: str | None = None, share_prefixes: bool = False) -> VerlRow:
    """Build a row on verl's own engine, or on one of this library."""
    if backend is None:
        own = FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        )
        return VerlRow(task, FSDPEngineWithLMHead, own, override_optimizer_config={"fused": True})
    options = {"mb_spec": {"share_prefixes": share_prefixes}}
    return VerlRow(task, ArealEngine, ArealEngineConfig(backend=backend, dtype="float32", options=options))
