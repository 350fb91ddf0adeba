"""Runs of TRL's GRPO: its own, and those on an engine. As a script, one run on the ranks of torchrun."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from areal.api import NamedTensor, TrainEngine
from areal.inference import LocalRollout
from areal.integrations.trl import EngineGRPOTrainer
from areal.tests.trl import tiny
from areal.tests.trl.curves import Curve
from areal.weight_sync.apply import load_named


def config(folder: str | Path, **changes: Any) -> GRPOConfig:
    """Return a configuration of steps of 16 answers in two micro-batches."""
    defaults = {
        "max_steps": 12,
        "per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", 1)),
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 16,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "seed": 3,
    }
    fixed = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return GRPOConfig(str(folder), **{**defaults, **fixed, **changes})


def own_trainer(path: str, args: GRPOConfig, rollout: LocalRollout | None, **options: Any) -> GRPOTrainer:
    """Return TRL's trainer. ``rollout`` generates in place of its own model."""

    def generate(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        # The adapter's function, with TRL's model as the engine.
        trainer.engine, trainer._rollout, trainer._sync = trainer.model, rollout, send
        trainer._answers = lambda ids: EngineGRPOTrainer._answers(trainer, ids)
        return EngineGRPOTrainer._generate_answers(trainer, prompts, trainer)

    def send(model: Any, version: int) -> None:
        assert rollout is not None
        rollout.update((NamedTensor(name, weight.detach()) for name, weight in model.named_parameters()), version)

    function = generate if rollout else None
    return GRPOTrainer(path, tiny.reward, args, tiny.data_set(), rollout_func=function, **options)


def own(path: str, args: GRPOConfig, rollout: LocalRollout | None = None) -> Curve:
    """Train with TRL's trainer."""
    trainer = own_trainer(path, args, rollout)
    trainer.train()
    return Curve.of(trainer, trainer.accelerator.unwrap_model(trainer.model).named_parameters())


def engine_trainer(
    engine: TrainEngine, args: GRPOConfig, rollout: LocalRollout | None, **options: Any
) -> EngineGRPOTrainer:
    """Return the trainer of an engine. Without ``rollout``, a copy of the model generates as TRL does, from the same random numbers."""
    options = {"reward_funcs": tiny.reward, "train_dataset": tiny.data_set(), **options}
    if rollout is None:
        return EngineGRPOTrainer(engine, None, print, args=args, rollout_func=_Sampler(engine.config.path), **options)

    def send(source: TrainEngine, version: int) -> None:
        rollout.update(source.named_tensors(), version)

    return EngineGRPOTrainer(engine, rollout, send, args=args, **options)


def on_engine(path: str, args: GRPOConfig, rollout: LocalRollout | None = None, **changes: Any) -> Curve:
    """Train on an engine."""
    with tiny.engine(path, **changes) as engine:
        trainer = engine_trainer(engine, args, rollout)
        trainer.train()
        return Curve.of(trainer, engine.named_tensors())


class _Sampler:
    """Generation with ``transformers`` on a copy of the engine's weights, with TRL's padding and configuration."""

    def __init__(self, path: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path).eval()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        load_named(self._model, trainer.engine.named_tensors())
        tokens = trainer.processing_class
        ids = [tokens.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in prompts]
        padded = tokens.pad({"input_ids": ids}, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            rows = self._model.generate(**padded, generation_config=trainer.generation_config)
        answers = [self._cut(row, trainer.eos_token_ids) for row in rows[:, padded["input_ids"].shape[1] :].tolist()]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}

    def _cut(self, row: list[int], ends: list[int]) -> list[int]:
        return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("output")
    parser.add_argument("--backend", help="an engine; TRL's own model by default")
    options = parser.parse_args()
    args = config(options.output + "-runs", max_steps=6)
    with tiny.local_rollout(options.path) as rollout:
        if options.backend:
            curve = on_engine(options.path, args, rollout, backend=options.backend)
        else:
            curve = own(options.path, args, rollout)
    if args.process_index == 0:
        torch.save((curve.logs, curve.weights), options.output)


if __name__ == "__main__":
    main()
