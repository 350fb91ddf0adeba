"""The engine interface of verl on the engines of this library.

verl's losses are sums over a micro-batch, divided by the tokens of the global batch and multiplied by the data-parallel size, for engines
that average gradients over ranks. Here gradients are summed: each loss is divided by the data-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from areal.api import FinetuneSpec, MicroBatch, MicroBatchList, MicroBatchSpec, NamedTensor, SaveLoadMeta, TokenOutputs
from areal.api.engine import Outputs
from areal.engine.registry import create_engine
from areal.integrations.options import check_options
from areal.integrations.verl.config import ArealEngineConfig, translated

OUTPUTS: dict[Any, str] = {"logprobs": "log_probs", "entropy": "entropy", "values": "values"}
"""Names of per-token outputs, and what verl calls them."""

UNSUPPORTED = ("calculate_sum_pi_squared", "distillation_use_topk", "enable_routing_replay")
"""Flags of a batch that no engine of this library honours."""


@EngineRegistry.register("language_model", "areal", device=["cuda", "npu", "cpu"])
@EngineRegistry.register("value_model", "areal", device=["cuda", "npu", "cpu"])
class ArealEngine(BaseEngine):
    """Implements verl's ``BaseEngine``. Arguments are sections of verl's configuration.

    Raises:
        ValueError: an option cannot be honoured, or the layout does not fit the world.
    """

    def __init__(
        self, model_config: Any, engine_config: ArealEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config, self.optimizer_config = model_config, engine_config, optimizer_config
        # verl's retention of checkpoints, and its reading of `save_contents`.
        self._checkpoints = BaseCheckpointManager(None, None, checkpoint_config=checkpoint_config)
        self._config = translated(model_config, engine_config, optimizer_config)
        self._config.dims.check_world(dist.get_world_size())
        self._schedule: Any = None
        self.engine = create_engine(self._config)

    def initialize(self) -> None:
        # verl calls this again to begin anew.
        self.engine.destroy()
        self.engine = create_engine(self._config)
        self.engine.initialize(FinetuneSpec())
        if self.model_config.lora_adapter_path:
            self.engine.adapters.load(self.engine.adapters.names[0], self.model_config.lora_adapter_path)
        if self._config.optimizer is not None:
            self._schedule = self._make_schedule()
        self._offload()

    def _offload(self) -> None:
        """Move to the host what verl wants to be there between modes."""
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled, grad=False)

    def _make_schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        """Return verl's own schedule, on an optimizer that only has its learning rate."""
        optim, dummy = self.optimizer_config, torch.optim.SGD([torch.zeros(1)], lr=self.optimizer_config.lr)
        total, warmup = optim.total_training_steps, optim.lr_warmup_steps or 0
        warmup = warmup if warmup > 0 else int(optim.lr_warmup_steps_ratio * total)
        if getattr(optim, "lr_scheduler_type", "constant") == "constant":
            return get_constant_schedule_with_warmup(dummy, num_warmup_steps=warmup)
        return get_cosine_schedule_with_warmup(
            dummy,
            num_warmup_steps=warmup,
            num_training_steps=total,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
            zero_indexed_step=optim.zero_indexed_step,
        )

    # ---- position, modes and memory

    def get_data_parallel_rank(self) -> int:
        return self.engine.dp_rank

    def get_data_parallel_size(self) -> int:
        return self.engine.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.engine.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.engine.is_main

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    @contextmanager
    def train_mode(self, zero_grad_on_exit: bool = True, **kwargs: Any) -> Iterator[None]:
        with BaseEngineCtx(self, "train", **kwargs), ExitStack() as stack:
            stack.callback(self.engine.zero_grad)
            yield
            if not zero_grad_on_exit:
                stack.pop_all()  # after an error, gradients never stay

    @contextmanager
    def eval_mode(self, **kwargs: Any) -> Iterator[None]:
        with BaseEngineCtx(self, "eval", **kwargs), self.engine.evaluating():
            yield

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        move = self.engine.offload if device == "cpu" else self.engine.onload
        if model or optimizer or grad:
            move(params=model, grads=grad, optimizer=optimizer)

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.engine.reference()

    # ---- a batch

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        _check_batch(data)
        size = self.engine.dp_size
        tokens = self.engine.global_sum(data["loss_mask"].sum().double())
        tu.assign_non_tensor(data, batch_num_tokens=int(tokens), dp_size=size, sp_size=1)
        names: Outputs = ("values",) if self._config.value_head else ("logprobs",)
        if tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False):
            names += ("entropy",)
        keeps = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)

        def process(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
            values: dict[str, Tensor] = {OUTPUTS[name]: getattr(out, str(name)) for name in names}
            kept = {name: value.detach() for name, value in values.items()} if keeps else {}
            if loss_function is None:
                return None, {"loss": 1.0, "metrics": {}, "values": kept}
            part = tu.index_select_tensor_dict(data, torch.tensor(mb.sample_ids)).to(self.engine.device)
            offsets = mb.cu_seqlens.long()
            jagged = {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in values.items()}
            loss, metrics = loss_function(model_output=jagged, data=part, dp_group=self.engine.dp_group)
            return loss / size, {"loss": loss.item(), "metrics": metrics, "values": kept}

        mbs = self._microbatches(data)
        results = self.engine.forward_backward_batch(mbs, process, outputs=names, forward_only=forward_only)
        metrics: dict[str, Any] = {}
        for result in results:
            append_to_dict(metrics, result["metrics"])
        restored = mbs.restore([result["values"] for result in results]) if keeps else {}
        outputs = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in restored.items()}
        return {"model_output": outputs, "loss": [result["loss"] for result in results], "metrics": metrics}

    def _microbatches(self, data: TensorDict) -> MicroBatchList:
        """Divide a batch, into equally many micro-batches on all ranks: verl compares the metrics of ranks one by one."""
        samples = _samples(data)
        mbs = self.engine.microbatches(samples, mb_spec=self._spec(data))
        counts = self.engine.control.gather(len(mbs.real))
        if len(set(counts)) == 1:
            return mbs
        return self.engine.microbatches(samples, mb_spec=self._spec(data, n_mbs=max(counts)))

    def _spec(self, data: TensorDict, n_mbs: int | None = None) -> MicroBatchSpec:
        """Return verl's rules for micro-batches: a number of samples, or a budget for each rank that divides a sequence.

        Args:
            data: batch with verl's rules.
            n_mbs: least number of micro-batches of a budget.
        """
        group = tu.get_non_tensor_data(data=data, key="force_group_size", default=1)
        rules = {"granularity": group, "equal_batches": "allow", "overlong": "alone"}
        # What the caller configured in engine.options applies too, such as shared prefixes.
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            budget = tu.get_non_tensor_data(data=data, key="max_token_len_per_gpu", default=None)
            budget = budget and budget * self.engine.dims.cp
            return self._config.mb_spec.resized(max_tokens_per_mb=budget, n_mbs=n_mbs, **rules)
        samples = tu.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=None)
        return self._config.mb_spec.resized(samples_per_mb=samples and samples * group, **rules)

    # ---- optimizer

    def optimizer_zero_grad(self) -> None:
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        # verl owns the schedule: its state is in checkpoints, and it has the rate of each step.
        if self._schedule is not None:
            self.engine.set_lr(float(self._schedule.get_last_lr()[0]))
        return self.engine.optimizer_step().grad_norm

    def lr_scheduler_step(self) -> float:
        self._schedule.step()
        return float(self._schedule.get_last_lr()[0])

    # ---- checkpoints and weights

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        folder = Path(local_path)
        contents = self._checkpoints
        self.engine.save(self._meta(folder, optimizer=contents.should_save_optimizer, extra=contents.should_save_extra))
        if self._checkpoints.should_save_hf_model:
            self.engine.save(SaveLoadMeta(folder / "huggingface"))
        self._offload()
        if dist.get_rank() == 0:
            self._checkpoints.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        contents = self._checkpoints
        if not contents.should_load_model:
            raise ValueError(
                f"checkpoint.load_contents = {list(contents.checkpoint_load_contents)}: a checkpoint is loaded with its model; add 'model'"
            )
        optimizer, extra = contents.should_load_optimizer, contents.should_load_extra
        self.engine.load(self._meta(Path(local_path), optimizer=optimizer, extra=extra))
        self._offload()

    def _meta(self, folder: Path, *, optimizer: bool, extra: bool) -> SaveLoadMeta:
        stateful: dict[str, Any] = {"schedule": self._schedule} if extra and self._schedule is not None else {}
        with_optim = optimizer and self._config.optimizer is not None
        return SaveLoadMeta(folder / "areal", weight_format="dcp", with_optim=with_optim, stateful=stateful)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[NamedTensor], dict[str, Any] | None]:
        dtype = torch.bfloat16 if self._config.dtype == "bfloat16" else None
        if self._config.lora is None or self.model_config.lora.get("merge", False):
            return self.engine.named_tensors(dtype=dtype), None
        # verl and vLLM compare members of peft's enumerations.
        peft = LoraConfig(**self.engine.adapters.peft_config())
        tensors = self.engine.adapters.named_tensors() if base_sync_done else self._base_tensors(dtype, peft)
        return tensors, peft.to_dict()

    def _base_tensors(self, dtype: torch.dtype | None, peft: LoraConfig) -> Iterator[NamedTensor]:
        """Yield the weights under the adapter, under the names that they have below peft's layers."""
        with self.engine.reference():
            for name, tensor in self.engine.named_tensors(dtype=dtype):
                yield NamedTensor(replace_lora_wrapper(name, peft), tensor)


def _check_batch(data: TensorDict) -> None:
    """Raise for flags and columns of a batch that no engine of this library honours."""
    found = {flag: tu.get_non_tensor_data(data=data, key=flag, default=False) for flag in UNSUPPORTED}
    # verl's agent loop adds this column to batches of text too, with an empty dict for each sample.
    found["multi_modal_inputs"] = any(tu.get(data, "multi_modal_inputs") or ())
    check_options({name: (x, [False]) for name, x in found.items()}, "engine.strategy = 'areal'", "leave it out")


def _samples(data: TensorDict) -> list[dict[str, Tensor]]:
    """Return the samples of a batch of verl's."""
    rows = data["input_ids"].unbind()
    temperatures = torch.as_tensor(tu.get(data, "temperature", 1.0), dtype=torch.float32).expand(len(rows))
    return [{"input_ids": row, "temperature": scale} for row, scale in zip(rows, temperatures, strict=True)]
