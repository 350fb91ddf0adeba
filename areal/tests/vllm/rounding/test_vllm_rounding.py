"""A trainer with ``fsdp.quantization`` and a vLLM server round alike: weights, and log-probs of answers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import QuantizationConfig
from areal.engine.torch.quantization.formats import format_of
from areal.inference.http import HTTPRollout
from areal.inference.protocol import Completion
from areal.tests.harness.tiny import started
from areal.tests.vllm import server
from areal.tests.vllm.answers import endless, prompt, run
from areal.tests.vllm.server import PYTHON, replica, weights

pytestmark = server.marks

ROUND = """
import sys, torch
from vllm.model_executor.layers.quantization.online import fp8
weight = torch.load(sys.argv[1])
scale = fp8._fp8_channel_scale(weight.abs().amax(-1, keepdim=True))
blocks, scales = fp8.per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
rounded = {"fp8": fp8._fp8_quant_per_channel(weight, scale).float() * scale, "fp8_blocks": blocks.float() * whole}
torch.save(rounded, sys.argv[1])
"""


def test_weights_have_the_bits_of_vllm(tmp_path: Path) -> None:
    """By the functions with which vLLM rounds 16-bit weights when it loads them."""
    file, generator = tmp_path / "weight.pt", torch.Generator().manual_seed(0)
    sizes = torch.randn(256, 1, generator=generator).exp()
    weight = (torch.randn(256, 384, generator=generator) * sizes).bfloat16()
    torch.save(weight, file)
    subprocess.run([PYTHON, "-W", "ignore", "-c", ROUND, file], check=True, cwd=tmp_path, timeout=300)
    theirs = torch.load(file)
    rows, blocks = (format_of(QuantizationConfig.model_validate({"format": form})).weight for form in theirs)
    assert torch.equal(rows(weight.float()), theirs["fp8"])
    assert torch.equal(rows(weight), theirs["fp8"].bfloat16())
    # For blocks, vLLM multiplies by the inverse of a scale: a number in the middle of two float8 numbers may go to the other one.
    other = blocks(weight.float()) != theirs["fp8_blocks"]
    assert other.float().mean() < 2e-3
    errors = [(each - weight.float()).abs()[other] for each in (blocks(weight.float()), theirs["fp8_blocks"])]
    assert torch.allclose(*errors, rtol=1e-4)


# ---- a server that rounds


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    # It rounds 16-bit models alone.
    return {"lora": False, "flags": ("--dtype", "bfloat16", "--quantization", "fp8_per_channel")}


def trainers(model: str, quantization: Any, samples: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Return log-probs of an engine in bfloat16."""
    with started("fsdp:d1", path=model, dtype="bfloat16", fsdp={"quantization": quantization}) as engine:
        return engine.forward_batch(samples)


def errors(answers: Sequence[Completion], prompts: Sequence[Sequence[int]], logprobs: Sequence[Tensor]) -> float:
    """Return the mean difference of log-probs of answers."""
    # Index t has the log-prob of the token after t.
    found = [row[len(asked) - 1 : -1] for row, asked in zip(logprobs, prompts, strict=True)]
    theirs = torch.cat([torch.tensor(answer.logprobs) for answer in answers])
    return (torch.cat(found).cpu().float() - theirs).abs().mean().item()


def test_log_probs_are_nearer_with_the_rounding_of_the_server(
    connect: Callable[..., HTTPRollout], vllm: Any, tmp_path: Path
) -> None:
    fp8 = QuantizationConfig(format="fp8")
    with pytest.raises(ValueError, match=r"the trainer rounds weights to fp8_blocks, and the server to fp8: start"):
        connect(quantization=QuantizationConfig(format="fp8_blocks"))
    rollout = connect(quantization=fp8)
    prompts = [prompt(i) for i in range(12)]
    for version in range(2):
        if version:
            # It rounds what it loads.
            rollout.update(weights(version), version)
        model = replica(version or None)
        model.save_pretrained(tmp_path / str(version))
        answers = run(*(rollout.generate(each, endless(32, seed=i)) for i, each in enumerate(prompts)))
        samples = [
            {"input_ids": torch.tensor([*asked, *answer.tokens])}
            for asked, answer in zip(prompts, answers, strict=True)
        ]
        alike, plain, other = (
            errors(answers, prompts, trainers(str(tmp_path / str(version)), each, samples))
            for each in (fp8, None, QuantizationConfig(format="fp8_blocks"))
        )
        print(
            f"version {version}: {alike:.1e} with the rounding of the server, {plain:.1e} without, {other:.1e} with another"
        )
        # What is left: inputs that bfloat16 rounds differently may round to the neighbouring float8 number.
        assert alike < 0.8 * min(plain, other)
