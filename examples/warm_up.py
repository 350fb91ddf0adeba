"""Supervised steps before reinforcement learning, so that some answers are right to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chat import ChatFormat
from report import Report
from rl_settings import RLConfig
from tasks import Problem

from areal import FinetuneSpec, SaveLoadMeta, TrainEngine, TrainEngineConfig, create_engine
from areal.api import StepOutput
from areal.trainer.supervised import sft_trainer
from areal.utils.data import sharded_loader


def warm_up(
    config: RLConfig,
    chat: ChatFormat,
    problems: Sequence[Problem],
    report: Report,
    new_engine: Callable[[TrainEngineConfig], TrainEngine] = create_engine,
) -> str:
    """Train on right answers, in a separate engine, so that reinforcement learning starts without the momentum of these steps.

    Args:
        config: settings of the run.
        chat: conversion to token ids.
        problems: problems to train on.
        report: console output.
        new_engine: makes the engine.

    Returns:
        Directory of the trained model.
    """
    if not config.warmup_steps:
        return config.model
    path = config.output / "warm"
    settings = config.engine(path=config.model, lr=config.warmup_lr)
    with new_engine(settings) as engine, report.progress("warm-up", config.warmup_steps) as advance:
        engine.initialize(FinetuneSpec(total_train_steps=config.warmup_steps))
        loader = sharded_loader(
            chat.samples(problems),
            batch_size=config.warmup_batch_size,
            dp_rank=engine.dp_rank,
            dp_size=engine.dp_size,
            shuffle=False,
        )

        def report_step(step: StepOutput) -> None:
            advance(f"loss {step.loss:.3f}  {step.n_tokens} tokens  {step.seconds:.1f} s")

        sft_trainer(engine, loader).train(config.warmup_steps, after_step=report_step)
        engine.save(SaveLoadMeta(path, weight_format="hf"))
    return str(path)
