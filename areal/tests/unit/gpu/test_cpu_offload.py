"""``fsdp.cpu_offload``: parameters are in host memory, buffers on the device that computes (here the meta device)."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal.engine.fsdp import engine as fsdp
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.weights import init_weights, load_weights
from areal.tests.harness.tiny import family_dir, started
from areal.utils import platform

HOST, DEVICE = torch.device("cpu"), torch.device("meta")


def model_on_meta(path: str) -> PackedCausalLM:
    with torch.device("meta"):
        return PackedCausalLM(AutoModelForCausalLM.from_config(copy.deepcopy(AutoConfig.from_pretrained(path))))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("scratch", [False, True], ids=["files", "scratch"])
def test_buffers_are_on_the_device_that_computes(family: str, scratch: bool) -> None:
    """DeepSeek-V3 adds a buffer to the scores of its router; FSDP moves parameters to the device, but no buffer."""
    path = family_dir(family)
    model = model_on_meta(path)
    if scratch:
        init_weights(ModelChunks.of(model), 0, HOST, DEVICE)
    else:
        load_weights(ModelChunks.of(model), path, HOST, DEVICE)
    buffers = dict(model.named_buffers())
    assert buffers
    assert {name: buffer.device for name, buffer in buffers.items()} == dict.fromkeys(buffers, DEVICE)
    assert {parameter.device for parameter in model.parameters()} == {HOST}
    assert ("deepseek" in family) == any("e_score_correction_bias" in name for name in buffers)


@pytest.mark.world(1)
@pytest.mark.parametrize("offload", [False, True])
def test_the_engine_offloads_parameters_only(offload: bool, world_size: int) -> None:
    """The index tells the engine's device from the host, and torch ignores it for a CPU."""
    computes = torch.device("cpu", 0)
    with (
        mock.patch.object(platform, "current_device", return_value=computes),
        mock.patch.object(fsdp, "load_weights", wraps=load_weights) as loads,
        started("fsdp:d1", path=family_dir("deepseek_v3"), fsdp={"cpu_offload": offload}),
    ):
        (_, _, parameters, buffers), _ = loads.call_args
    assert (parameters, buffers) == (HOST if offload else computes, computes)
