"""One family of the zoo: a tiny model, trained by the engine and by plain transformers one sequence at a time."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from areal.api import Batch, FinetuneSpec, FSDPConfig, MicroBatchSpec, TokenOutputs, TrainEngine, TrainEngineConfig
from areal.engine.model.media import IMAGE_FAMILIES
from areal.engine.model.tiny_config import VOCABULARY
from areal.engine.registry import create_engine
from areal.tests.zoo.configs import tiny_config

LENGTHS = (9, 1, 14, 2, 7)
"""Lengths of the sequences. The long ones exceed the tiny windows."""

TOLERANCE = 1e-3
"""Largest difference of log-probs, in nats, and of a gradient, relative to its norm. Rounding of float32 stays far below."""

FAULTS = ("wrong", "error")
"""Verdicts that are faults of the engine."""


@dataclass(frozen=True)
class Finding:
    """Result for one family.

    Attributes:
        verdict: ``packed`` or ``rows`` if log-probs and gradients agree; ``refused`` if the engine raises a ``ValueError`` when it is
            built; ``wrong`` if numbers differ; ``error`` for any other error of the engine; ``no model`` if transformers itself
            builds no tiny model of the family.
        why: reason, without numbers that depend on rounding.
    """

    verdict: str
    why: str = ""


def examine(family: str) -> Finding:
    """Run a tiny model of a family on one rank, and compare it with transformers."""
    with tempfile.TemporaryDirectory() as folder, _warnings() as said:
        try:
            write_model(family, folder)
        except Exception as error:  # a model may raise anything
            return Finding("no model", first_line(error))
        # The engine must refuse a model that transformers itself cannot run.
        expected, failure = None, ""
        try:
            expected = reference(folder)
        except Exception as error:
            failure = first_line(error)
        engine = create_engine(
            TrainEngineConfig(
                path=folder,
                dtype="float32",
                mb_spec=MicroBatchSpec(max_tokens_per_mb=20),
                fsdp=FSDPConfig(text_only=True),
            )
        )
        try:
            engine.initialize(FinetuneSpec(total_train_steps=1))
        except ValueError as error:
            return Finding("refused", first_line(error))
        except Exception as error:
            return Finding("error", first_line(error))
        try:
            with engine:
                found = trained(engine)
        except Exception as error:
            return Finding("error", first_line(error))
    if expected is None:
        return Finding("error", f"the engine trains what transformers does not run: {failure}")
    difference = compare(found, expected)
    if difference:
        return Finding("wrong", difference)
    why = next((text.partition("might mix: ")[2] for text in said if "one sequence per row" in text), None)
    return Finding("packed") if why is None else Finding("rows", shorten(why))


def write_model(family: str, folder: str) -> None:
    """Write a tiny model with random weights, in which biases are not 0 and norms not 1."""
    config = tiny_config(family)
    torch.manual_seed(0)
    model = _factory(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    # In a process group, save_pretrained writes on rank 0 only. A model with components saves only that of its language model.
    with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
        model.save_pretrained(folder)
        config.save_pretrained(folder)
    AutoConfig.from_pretrained(folder)  # some configurations cannot be read again


def _factory(config: PreTrainedConfig) -> Any:
    """Return the factory of transformers whose models have all weights of a family: with its vision tower, where the engine trains it."""
    return AutoModelForImageTextToText if config.model_type in IMAGE_FAMILIES else AutoModelForCausalLM


def reference(folder: str) -> dict[str, Tensor]:
    """Return log-probs and gradients of transformers, one sequence at a time."""
    factory = _factory(AutoConfig.from_pretrained(folder))
    model = factory.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = []
    for ids, factors in zip(_tokens(), _factors(), strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        picked = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        if len(ids) > 1:
            (picked * factors[:-1]).sum().backward()
        logprobs.append(picked.detach())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {LOGPROBS: torch.cat(logprobs), **revert_weight_conversion(model, gradients)}


def trained(engine: TrainEngine) -> dict[str, Tensor]:
    """Return log-probs of this rank's sequences and gradients of all of them, in several micro-batches."""
    everything = [{"input_ids": ids, "factors": factors} for ids, factors in zip(_tokens(), _factors(), strict=True)]
    batch = everything[engine.dp_rank :: engine.dp_size]

    def loss(out: TokenOutputs, mb: Batch) -> Tensor:
        return (out.logprobs * mb["factors"]).sum()

    logprobs = engine.forward_batch(batch)
    # Each sequence weighs 1 / n, so that the gradient is that of the plain sum.
    engine.forward_backward(batch, loss, lambda mb: torch.tensor((len(mb.cu_seqlens) - 1) / len(LENGTHS)))
    return {LOGPROBS: torch.cat([x[:-1] for x in logprobs]), **dict(engine.named_gradients())}


LOGPROBS = "log-probs"


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Describe the first large difference; empty if there is none."""
    error = (found[LOGPROBS] - expected[LOGPROBS]).abs().max().item()
    if not error <= TOLERANCE:
        return f"log-probs differ by {error:.2g} nats"
    # A gradient that is zero but for rounding is compared with the largest one.
    largest = max(tensor.norm().item() for name, tensor in expected.items() if name != LOGPROBS)
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            return f"only {'transformers' if name in expected else 'the engine'} has a gradient of {name}"
        error = (found[name] - expected[name]).norm().item() / (expected[name].norm().item() + 1e-3 * largest)
        if not error <= TOLERANCE:
            return f"the gradient of {name} differs by {error:.2g} of its size"
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an error, with its type unless that is the expected one."""
    text = (str(error).strip().splitlines() or [""])[0].removesuffix(" (the engine was not built)")
    return shorten(text if type(error) is ValueError else f"{type(error).__name__}: {text}")


def shorten(why: str) -> str:
    """Remove the size of a difference, which depends on rounding."""
    before, found, after = why.partition("differ by ")
    return f"{before}differ{after.partition(' of their size')[2]}" if found else why


def _tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def _factors() -> list[Tensor]:
    """Return factors of the log-probs in the loss."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(n, generator=generator) + 0.5 for n in LENGTHS]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of the library."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("areal")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
