"""Adapters on vLLM: answers have the log-probs of the engine with its adapter, after each new version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from areal.api import LoRAConfig, MicroBatchSpec
from areal.inference.http import HTTPRollout
from areal.tests.grid.models import adapter_dir
from areal.tests.harness.tiny import started
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, Clients, endless, error, prompt, run
from areal.tests.vllm.server import VLLMProcess, replica, served_model, weights

pytestmark = server.marks

LORA = LoRAConfig(rank=8, alpha=16, target_modules="all-linear")


def adapter(seed: int) -> str:
    return adapter_dir(served_model(), LORA, seed=seed)


def adapted(seed: int, base: int | None = None) -> PreTrainedModel:
    """Return the model with an adapter, as peft applies it."""
    return PeftModel.from_pretrained(replica(base), adapter(seed)).eval()  # type: ignore[return-value]


def load(vllm: VLLMProcess, name: str, folder: str) -> None:
    """Load an adapter as a rollout does, also under a name that is taken."""
    vllm.call("/v1/unload_lora_adapter", {"lora_name": name})
    status, answer = vllm.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    assert status == 200, answer


def test_answers_of_an_adapter_and_of_the_model_are_their_own(
    connect: Callable[..., HTTPRollout], vllm: VLLMProcess
) -> None:
    load(vllm, "policy", adapter(1))
    given = [prompt(i) for i in range(4)]
    rollout = connect("policy")
    by_adapter = run(*(rollout.generate(each, endless(24, seed=1)) for each in given))
    rollout = connect(vllm.model)
    by_model = run(*(rollout.generate(each, endless(24, seed=1)) for each in given))
    assert error({0: adapted(1)}, given, by_adapter) <= TOLERANCE
    assert error({0: replica()}, given, by_model) <= TOLERANCE
    assert error({0: replica()}, given, by_adapter) > 1


def test_new_version_of_an_adapter_leaves_nothing_stale(connect: Callable[..., HTTPRollout], vllm: VLLMProcess) -> None:
    """Not even of a prompt that is in the prefix cache."""
    given = prompt(7, 400)
    for seed in (1, 2, 3):
        load(vllm, "versioned", adapter(seed))
        rollout = connect("versioned")
        for _ in range(2):
            answers = run(rollout.generate(given, endless(16, seed=1)))
            assert error({0: adapted(seed)}, [given], answers) <= TOLERANCE


def test_answers_under_way_go_on_with_the_next_adapter(connect: Callable[..., HTTPRollout]) -> None:
    """vLLM itself would end them with the adapter with which they began, under the label of the next one."""
    rollout = connect(adapter="moving")
    rollout.load(adapter(1), 1)
    with Clients(rollout, 6, (40, 90, 150)) as clients:
        for seed in (2, 3):
            clients.wait_for(8)
            rollout.load(adapter(seed), seed)
        clients.wait_for(8)
    assert not clients.faults
    assert any(len(set(answer.versions)) > 1 for answer in clients.answers)
    assert error({seed: adapted(seed) for seed in (1, 2, 3)}, clients.prompts, clients.answers) <= TOLERANCE


def test_adapter_that_an_engine_saves_has_its_log_probs(
    connect: Callable[..., HTTPRollout], vllm: VLLMProcess, tmp_path: Path
) -> None:
    batch = MicroBatchSpec(max_tokens_per_mb=2048)
    with started("fsdp:d1", path=served_model(), lora=LORA, mb_spec=batch) as engine:
        engine.adapters.load("default", adapter(5))
        engine.adapters.save("default", tmp_path / "saved")
        load(vllm, "saved", str(tmp_path / "saved"))
        (answer,) = run(connect("saved").generate(prompt(1), endless(24, seed=1)))
        ids = torch.tensor([*prompt(1), *answer.tokens])
        (row,) = engine.forward_batch([{"input_ids": ids}])
    torch.testing.assert_close(torch.tensor(answer.logprobs), row[5:-1], rtol=0, atol=TOLERANCE)


def test_adapter_that_is_not_served_is_an_error(connect: Callable[..., HTTPRollout]) -> None:
    with pytest.raises((RuntimeError, ValueError), match="no-such-adapter"):
        run(connect("no-such-adapter").generate(prompt(1), endless(4)))


def test_update_of_the_model_leaves_adapters_on_it(
    fresh: HTTPRollout, connect: Callable[..., HTTPRollout], vllm: VLLMProcess
) -> None:
    load(vllm, "kept", adapter(4))
    fresh.update(weights(1), 1)
    answers = run(fresh.generate(prompt(1), endless(16)))
    assert error({1: replica(1)}, [prompt(1)], answers) <= TOLERANCE
    fresh.close()
    answers = run(connect("kept").generate(prompt(1), endless(16)))
    assert error({0: adapted(4, base=1)}, [prompt(1)], answers) <= TOLERANCE
