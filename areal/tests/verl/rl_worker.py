"""verl's training worker, as an actor or a critic, under torchrun: prints its losses, gradient norms, outputs and weights as JSON.

python -m torch.distributed.run ... -m areal.tests.verl.rl_worker MODEL ROLE ENGINE FOLDER
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from areal.integrations.verl import ArealEngineConfig

BATCH, PROMPT, ANSWER = 8, 12, 20


def padded_batch() -> dict[str, torch.Tensor]:
    """Return a batch of rollouts: prompts with padding on the left, answers with padding on the right."""
    draw = torch.Generator().manual_seed(1)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw)

    prompts = torch.randint(4, 124, (BATCH, PROMPT), generator=draw)
    answers = torch.randint(4, 124, (BATCH, ANSWER), generator=draw)
    here = torch.arange(PROMPT) >= torch.randint(0, PROMPT - 2, (BATCH, 1), generator=draw)
    there = torch.arange(ANSWER) < torch.randint(2, ANSWER + 1, (BATCH, 1), generator=draw)
    attention = torch.cat([here, there], 1).long()
    return {
        "prompts": prompts * here,
        "responses": answers * there,
        "input_ids": torch.cat([prompts * here, answers * there], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": there.long(),
        "advantages": (uniform(BATCH, ANSWER) - 0.5) * there,
        "noise": (uniform(BATCH, ANSWER) - 0.5) * there,
        "values": uniform(BATCH, ANSWER) * there,
        "returns": uniform(BATCH, ANSWER) * there,
    }


def worker_config(model: str, role: str, engine: str) -> TrainingWorkerConfig:
    """Return the configuration of a worker on a layout of this library, or on ``"verl"``'s own engine."""
    settings: dict[str, Any] = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64, "infer_max_token_len_per_gpu": 96}
    if engine == "verl":
        section: Any = FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            **settings,
        )
    else:
        offload = {"param_offload": True, "optimizer_offload": True}
        section = ArealEngineConfig(backend=engine, dtype="float32", **offload, **settings)
    return TrainingWorkerConfig(
        model_type="value_model" if role == "critic" else "language_model",
        model_config=HFModelConfig(
            path=model,
            enable_gradient_checkpointing=False,
            use_remove_padding=True,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=section,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, lr_warmup_steps=2),
        checkpoint_config=CheckpointConfig(),
    )


def loss_function(role: str, strategy: str) -> Any:
    """Return verl's loss of a role."""
    shared = {"strategy": strategy, "rollout_n": 1, "use_dynamic_bsz": True}
    if role == "critic":
        return partial(value_loss, config=CriticConfig(**shared))
    return partial(ppo_loss, config=ActorConfig(**shared, use_kl_loss=True, entropy_coeff=0.01, kl_loss_coef=0.1))


def in_verls_form(role: str, columns: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> TensorDict:
    """Return rows of a batch without padding, with the flags of verl's trainer."""
    data = left_right_2_no_padding(TensorDict(dict(columns), batch_size=[len(columns["input_ids"])]))
    lengths = tu.NonTensorData(whole["attention_mask"].sum(1).tolist())
    flags = {
        "temperature": 0.7,
        "global_batch_size": BATCH,
        "calculate_entropy": role == "actor",
        "global_token_num": lengths,
    }
    tu.assign_non_tensor(data, **flags)
    # verl's agent loop adds this column to batches without images too.
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{} for _ in columns["input_ids"]])
    return data


def old_and_reference(whole: dict[str, torch.Tensor], rows: list[list[float]]) -> dict[str, torch.Tensor]:
    """Return log-probs of the answers, as verl shifts them, with differences for the ratio and the penalty."""
    lengths, answers = whole["attention_mask"].sum(1).tolist(), whole["response_mask"].sum(1).tolist()
    old = torch.zeros(BATCH, ANSWER)
    for i, (row, n, answer) in enumerate(zip(rows, lengths, answers, strict=True)):
        old[i, :answer] = torch.tensor(row[n - answer - 1 : n - 1])
    return {"old_log_probs": old + 0.3 * whole["noise"], "ref_log_prob": old - 0.2 * whole["noise"]}


def main(model: str, role: str, engine: str, folder: str) -> None:
    config = worker_config(model, role, engine)
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(loss_function(role, config.engine_config.strategy))
    rank, size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    whole = padded_batch()

    def shard() -> TensorDict:
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        return in_verls_form(role, {name: x[mine] for name, x in whole.items()}, whole)

    said: dict[str, Any] = {"losses": [], "norms": []}
    asked = shard()
    tu.assign_non_tensor(asked, compute_loss=False)
    output = worker.infer_batch(asked)
    name = "values" if role == "critic" else "log_probs"
    own = [row.tolist() for row in output[name].unbind()] if output is not None else None
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (rank, own))
    answered = sorted((each for each in everyones if each[1]), key=lambda each: each[0])
    said["outputs"] = [row for _, some in answered for row in some]
    whole |= old_and_reference(whole, said["outputs"])

    def step() -> None:
        data = shard()
        # As verl's trainers call it: it compares the metrics of ranks micro-batch by micro-batch.
        tu.assign_non_tensor(data, num_mini_batch=1)
        output = worker.train_mini_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            said["losses"].append(float(np.mean(metrics["loss"])))
            said["norms"].append(float(np.mean(metrics["grad_norm"])))

    for _ in range(3):
        step()
    said["on_device"] = []
    for call in (worker.save_checkpoint, worker.load_checkpoint):
        call(str(Path(folder) / "checkpoint"))
        if engine != "verl":
            [memory] = worker.engine.engine.memory()
            said["on_device"] += [memory.params.on_device, memory.optimizer.on_device]
        step()
    if role == "actor":
        tensors, _ = worker.engine.get_per_tensor_param()
        said["weights"] = {name: tensor.double().abs().sum().item() for name, tensor in tensors}
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
