"""TRL's ``SFTTrainer`` with ``padding_free``: its own training loop, paused after each step until the next request."""

from __future__ import annotations

import tempfile
import threading
from queue import Queue
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.workload import plain_workload
from benchmarks.rows import Task


class _Turns(TrainerCallback):
    """Callback that lets the trainer take one step per item in ``asked``."""

    def __init__(self) -> None:
        self.asked: Queue[None] = Queue()
        self.done: Queue[BaseException | None] = Queue()
        self.grad_norm = float("nan")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.asked.get()

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.grad_norm = float(kwargs["logs"].get("grad_norm", float("nan")))
        self.done.put(None)


class _Trainer(SFTTrainer):
    """Trainer that stores its loss, because the logged loss is rounded."""

    last_loss = float("nan")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.last_loss = loss.item()
        return loss


class TRLRow:
    """A trainer in a separate thread."""

    can_forward = False

    def __init__(self, task: Task) -> None:
        workload = plain_workload(task)
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=len(workload.lengths),
            learning_rate=task.lr,
            weight_decay=task.weight_decay,
            max_grad_norm=task.clip,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_steps=1_000_000,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            padding_free=True,
            max_length=None,
        )
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        self.turns = _Turns()
        self.trainer = _Trainer(
            model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation="sdpa"),
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids in workload.input_ids]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
            callbacks=[self.turns],
        )
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        torch.set_num_threads(1)
        try:
            self.trainer.train()
        except BaseException as error:
            self.turns.done.put(error)

    def step(self) -> tuple[float, float]:
        """See :class:`benchmarks.rows.Row`."""
        self.turns.asked.put(None)
        error = self.turns.done.get()
        if error is not None:
            raise error
        return self.trainer.last_loss, self.turns.grad_norm

    def forward(self) -> list[Tensor]:
        """Not supported by a trainer."""
        raise NotImplementedError("SFTTrainer gives no log-probs")


def build(task: Task) -> TRLRow:
    """Build a row of this module."""
    return TRLRow(task)
