"""Updates of weights, in other processes too."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from areal.tests.grid.models import model_dir
from areal.tests.harness.pool import PRELOADED

FILE_BYTES = 5_000


def filled(value: float) -> nn.Module:
    """Return a tiny model whose weights are all one number."""
    made = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def number(module: nn.Module) -> float:
    """Return the number that all weights are equal to."""
    values = {float(value) for parameter in module.parameters() for value in parameter.unique()}
    assert len(values) == 1, f"a mix of {sorted(values)}"
    return values.pop()


def start(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def ended(process: multiprocessing.process.BaseProcess) -> int | None:
    process.join(60)
    code = process.exitcode
    process.kill()
    return code
