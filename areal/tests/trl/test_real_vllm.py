"""TRL's asynchronous GRPO on a real vLLM server, on the CPU: versions, staleness, and log-probs of the trainer's weights."""

from __future__ import annotations

import copy
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed: make test-trl")

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from areal.api import NamedTensor
from areal.inference.http import VLLM, HTTPRollout
from areal.inference.protocol import Completion, Sampling
from areal.integrations.trl import RolloutWorker, rewarded_answer
from areal.tests.trl import tiny
from areal.tests.trl.trl_loop import without_gpu
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, error, run
from areal.tests.vllm.server import SIZES, VLLMProcess

pytestmark = server.marks

STEPS = 3
SAMPLES = 16
"""Samples of a step."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the sizes that vLLM supports on a CPU, with the tokenizer of TRL's tests."""
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny", **sizes)


@pytest.fixture(scope="module")
def vllm(path: str) -> Iterator[VLLMProcess]:
    process = VLLMProcess(path, lora=False)
    yield process
    process.close()


class RecordingRollout(HTTPRollout):
    """Rollout that keeps its answers, and a model with the weights of each version that the trainer has sent."""

    def __init__(self, vllm: VLLMProcess, folder: Path) -> None:
        super().__init__([vllm.url], VLLM(), folder=folder, model=vllm.model, timeout=120, deadline=120)
        self.prompts: list[list[int]] = []
        self.answers: list[Completion] = []
        self.models: dict[int, PreTrainedModel] = {}
        self._base: Any = AutoModelForCausalLM.from_pretrained(vllm.model, dtype="float32").eval()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        answer = await super().generate(prompt_ids, sampling)
        self.prompts.append(list(prompt_ids))
        self.answers.append(answer)
        return answer

    def update(self, tensors: Iterator[NamedTensor], version: int) -> None:
        sent = [NamedTensor(each.name, each.tensor.detach().clone()) for each in tensors]
        self.models[version] = copy.deepcopy(self._base)
        self.models[version].load_state_dict({each.name: each.tensor for each in sent})
        super().update(iter(sent), version)


class RecordingQueue(queue.Queue[RolloutSample]):
    """Queue that keeps the version of each sample that the trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        sample = super().get(block, timeout)
        self.taken.append(sample.model_version)
        return sample


@pytest.mark.parametrize("staleness", [1, 2])
def test_steps_on_a_real_server_have_the_log_probs_of_the_trainer(
    path: str, vllm: VLLMProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    without_gpu(monkeypatch)
    args = AsyncGRPOConfig(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES,
        num_generations=4,
        max_completion_length=24,
        token_budget=0,
        max_staleness=staleness,
        learning_rate=1e-2,
        seed=3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokens, items, updates = tiny.tokenizer(), tiny.data_set(), vllm.asked("/collective_rpc")
    with RecordingRollout(vllm, tmp_path / "weights") as rollout:
        worker = RolloutWorker(rollout, items, args, tokens, rewarded_answer(args, tokens, tiny.reward))
        buffer = worker.rollout_buffer = RecordingQueue()
        trainer = AsyncGRPOTrainer(path, tiny.reward, args, items, rollout_worker=worker, weight_transfer=worker)
        trainer.train()
        # After the run, the server has the trainer's last weights.
        last = Sampling(24, seed=1, stop_token_ids=())
        (answer,) = run(rollout.generate([5, 6, 7, 8], last))
    logs = [log for log in trainer.state.log_history if "loss" in log]

    # The weights of the start are version 1, and each step sends the next.
    versions = list(range(1, STEPS + 2))
    assert list(rollout.models) == versions
    assert vllm.asked("/collective_rpc") - updates == STEPS + 1
    assert len(logs) == STEPS
    assert all(log["grad_norm"] > 0 for log in logs)

    # Each token has the version of its weights, and versions of an answer ascend.
    drawn = [each.versions for each in rollout.answers]
    assert all(list(each) == sorted(each) for each in drawn)
    assert {1} < {version for each in drawn for version in each} <= set(versions)
    # With one step ahead, the groups of the third step start with the second version at the earliest.
    assert staleness > 1 or sum(each[0] > 1 for each in drawn) >= SAMPLES
    assert all(log.get("sample/dropped_stale_total") is None for log in logs)
    # TRL measures staleness when it fetches a sample, one step before it trains on the sample.
    assert max(log["sample/staleness_max"] for log in logs) <= staleness
    trained = [(1 + number // SAMPLES, version) for number, version in enumerate(buffer.taken[: STEPS * SAMPLES])]
    assert len(trained) == STEPS * SAMPLES
    assert all(0 <= step - version <= staleness for step, version in trained)

    # Log-probs of sampled tokens are those of the trainer's weights of their version.
    worst = error(rollout.models, rollout.prompts, rollout.answers)
    several = sum(len(set(each)) > 1 for each in drawn)
    print(f"log-prob error {worst:.1e} of {sum(map(len, drawn))} tokens; {several} answers have several versions")
    assert worst <= TOLERANCE
    # The judge itself: under the weights of another version, the errors are large.
    others = {version: rollout.models[version % (STEPS + 1) + 1] for version in versions}
    assert error(others, rollout.prompts, rollout.answers) > 100 * TOLERANCE
    # TRL's own forward agrees: the first step trains on answers of the weights that it has.
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-5)

    assert set(answer.versions) == {versions[-1]}
    final = rollout.models[versions[-1]].state_dict()
    assert all(torch.equal(final[name], tensor) for name, tensor in trainer.model.named_parameters())
