"""Servers with another model or tokenizer are refused when they are opened. Paths do not count."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal.api import QuantizationConfig
from areal.inference.http import SGLang
from areal.inference.http.model_check import ModelCheck
from areal.inference.http.servers.dialect import ServedModel
from areal.inference.http.servers.http_call import HTTPCall
from areal.inference.http.servers.rounding import served_format, trained_format
from areal.tests.grid.models import model_dir
from areal.tests.harness.servers.rollout_http import PROMPT, Process, run
from areal.tests.harness.servers.tokenizers import with_tokenizer
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_model_of_another_shape_is_refused(make_vllm: Make, vllm: Process, sglang: Process, kind: str) -> None:
    server, options = (vllm, {}) if kind == "vllm" else (sglang, {"dialect": SGLang()})
    other = model_dir("qwen3", intermediate_size=64)
    server.tell(root=other)
    words = rf"{server.url}: it has the model '{other}', and HTTPRollout.model has '{model_dir('qwen3')}': intermediate_size = 64 and 48: "
    with pytest.raises(ValueError, match=words + "start the server with that model, or give the server's by model="):
        make_vllm(server, **options)
    assert server.calls("/resume") == server.calls("/continue_generation") == 0


def test_copy_of_the_model_is_accepted(make_vllm: Make, vllm: Process, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_dir("qwen3"), copy)
    vllm.tell(root=str(copy))
    make_vllm(vllm)
    # What cannot be read from here is not compared.
    vllm.tell(root="/elsewhere/of/the/server", label="default")
    make_vllm(vllm, take_over=True)


def test_weights_of_the_start_are_those_of_the_model(make_vllm: Make, vllm: Process) -> None:
    """Only as version 0: a later version may be that of any directory."""
    other = model_dir("qwen3", seed=5)
    vllm.tell(root=other)
    with pytest.raises(ValueError, match=rf"'{other}', and .*: their weights differ, such as lm_head.weight: start"):
        make_vllm(vllm)
    rollout = make_vllm(vllm, version=7)
    assert run(rollout.generate(PROMPT, endless(3)))[0].versions == (7,) * 3
    # A server that has had an update is without the weights of its start.
    rollout.close()
    make_vllm(vllm)


@pytest.mark.parametrize("options", [{}, {"dialect": SGLang()}], ids=["vllm", "sglang"])
def test_other_tokenizer_is_refused(
    make_vllm: Make, vllm: Process, sglang: Process, tmp_path: Path, options: dict[str, Any]
) -> None:
    server = sglang if options else vllm
    model = with_tokenizer(tmp_path / "model")
    server.tell(tokenizer=with_tokenizer(tmp_path / "other", reversed_ids=True))
    with pytest.raises(ValueError, match=rf"{server.url}: it has the model .*: their tokenizers give different tokens"):
        make_vllm(server, model=model, **options)
    server.tell(tokenizer=model)
    make_vllm(server, model=model, **options)


def test_servers_of_one_owner_are_equal() -> None:
    """Without ``model=``, they are compared with each other."""
    check = ModelCheck(None)

    async def ask(call: HTTPCall[Any]) -> None:
        return None

    def first_contact(url: str, path: str) -> None:
        asyncio.run(check.check(url, ServedModel(path), ask, start=True))

    first_contact("http://a", model_dir("qwen3"))
    # Any model of this shape.
    first_contact("http://b", model_dir("qwen3", seed=5))
    with pytest.raises(ValueError, match=r"it has the model .*, and http://a has .*: intermediate_size = 64 and 48"):
        first_contact("http://c", model_dir("qwen3", intermediate_size=64))


@pytest.mark.parametrize("options", [{}, {"dialect": SGLang()}], ids=["vllm", "sglang"])
def test_server_that_rounds_in_another_way_is_refused(
    make_vllm: Make, vllm: Process, sglang: Process, options: dict[str, Any]
) -> None:
    server = sglang if options else vllm
    blocks = QuantizationConfig(format="fp8_blocks")
    with pytest.raises(
        ValueError, match=rf"{server.url}: the trainer rounds weights to fp8_blocks, and the server to no"
    ):
        make_vllm(server, quantization=blocks, **options)
    server.tell(quantization="fp8_per_channel")
    with pytest.raises(ValueError, match=r"the trainer rounds weights to fp8_blocks, and the server to fp8: start"):
        make_vllm(server, quantization=blocks, **options)
    make_vllm(server, quantization=QuantizationConfig(format="fp8"), **options).close()
    if server is vllm:
        server.tell(quantization="fp8")
        with pytest.raises(ValueError, match="the trainer rounds weights to fp8, and the server to fp8_per_tensor"):
            make_vllm(server, quantization=QuantizationConfig(format="fp8"))
        server.tell(quantization="fp8_per_channel")
    with pytest.warns(UserWarning, match=r"the server rounds weights to fp8, and the trainer does not"):
        make_vllm(server, **options)


def weights(**fields: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **fields}}}}


@pytest.mark.parametrize(
    ("method", "files", "expected"),
    [
        (None, None, None),
        ("", None, ""),
        ("unquant", None, ""),
        ("fp8_per_tensor", None, "fp8_per_tensor"),
        ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_blocks"),
        ("", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_blocks"),
        ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}, "fp8_per_tensor"),
        ("", {"quant_method": "fp8", "weight_block_size": None}, "fp8_per_tensor"),
        ("fp8", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8, blocks of [64, 64]"),
        ("fp8_per_tensor", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_blocks"),
        ("fp8", None, "fp8"),
        ("compressed-tensors", None, "compressed-tensors"),
        ("compressed-tensors", weights(type="int", num_bits=4, strategy="group", group_size=64), "int4, groups of 64"),
        ("compressed-tensors", weights(type="int", num_bits=4, strategy="group", symmetric=False), "compressed-tensors"),
        ("compressed-tensors", weights(type="float", num_bits=4, strategy="tensor_group", group_size=16), "nvfp4"),
        ("compressed-tensors", weights(type="float", num_bits=8, strategy="channel"), "compressed-tensors"),
    ],
)  # fmt: skip
def test_formats_of_servers(method: str | None, files: dict[str, Any] | None, expected: str | None) -> None:
    assert served_format(method, files) == expected


def test_formats_of_a_trainer_are_those_of_servers() -> None:
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    channel = weights(type="float", num_bits=8, strategy="channel")
    channel["config_groups"]["group_0"]["input_activations"] = inputs
    served = {
        "fp8": ("compressed-tensors", channel),
        "fp8_blocks": ("fp8_per_block", None),
        "int4": ("compressed-tensors", weights(type="int", num_bits=4, strategy="group", group_size=128)),
        "nvfp4": ("compressed-tensors", weights(type="float", num_bits=4, strategy="tensor_group")),
    }
    for form, (method, files) in served.items():
        assert served_format(method, files) == trained_format(QuantizationConfig.model_validate({"format": form}))
