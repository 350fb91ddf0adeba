"""Checkpoints of a model: exact to the bit over further steps, peft's format for samplers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from areal.tests.grid.models import model_dir
from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import STEP, data, request, run, same, trained, weights
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import AdapterSpec, PassResult
from areal.tinker.backends.training.engine_backend import EngineBackend


def history(backend: EngineBackend, model: str, steps: int) -> list[Any]:
    """Train for some steps. Returns losses, log-probs and metrics of each."""
    out = []
    for number in range(steps):
        result = run(backend, request(model, data("weights", seed=number, lengths=(7, 30))))
        out.append((result.metrics, [x.tobytes() for x in result.logprobs], backend.optim_step(model, STEP)))
    return out


def test_resumed_model_is_equal_to_the_bit_over_ten_steps(backend: EngineBackend, start: Start, tmp_path: Path) -> None:
    trained(backend, "s:train:0", rank=6, steps=3, mlp=False)
    # Gradients of requests before the save are not part of it.
    backend.save("s:train:0", tmp_path / "weights" / "0003")
    expected = history(backend, "s:train:0", 10)
    final = weights(backend, "s:train:0")

    # Under another id of the same server, in place of a model that was trained further, and on another server.
    other = start(max_tokens_per_mb=64)
    trained(other, "s:train:0", rank=3, seed=1)
    for server, model in ((backend, "t:train:0"), (backend, "s:train:0"), (other, "s:train:0")):
        adapter = server.load(model, tmp_path / "weights" / "0003", with_optimizer=True)
        assert adapter == AdapterSpec(6, seed=7, mlp=False, alpha=32.0)
        assert history(server, model, 10) == expected
        assert same(weights(server, model), final)
    assert len(backend.group.adapters.names) == 3


def test_bfloat16_model_has_float32_adapters_and_resumes_exactly(start: Start, tmp_path: Path) -> None:
    made = start(dtype="bfloat16")
    trained(made, "a", steps=2)
    assert {x.dtype for x in weights(made, "a").values()} == {torch.float32}
    made.save("a", tmp_path / "a")
    made.load("b", tmp_path / "a", with_optimizer=True)
    assert history(made, "a", 2) == history(made, "b", 2)
    assert run(made, request("a", data("weights"))).logprobs[0].dtype == np.float32


def test_load_without_the_optimizer_begins_with_new_moments(backend: EngineBackend, tmp_path: Path) -> None:
    trained(backend, "a", steps=3)
    before = weights(backend, "a")
    backend.save("a", tmp_path / "a")
    backend.save_for_sampler("a", tmp_path / "sampler")
    for model, folder in (("b", "a"), ("c", "sampler")):
        backend.load(model, tmp_path / folder, with_optimizer=False)
        assert same(weights(backend, model), before)
    expected = history(backend, "a", 1)
    mine, other = history(backend, "b", 1), history(backend, "c", 1)
    assert mine == other
    assert mine[0][:2] == expected[0][:2]
    assert not same(weights(backend, "a"), weights(backend, "b"))
    with pytest.raises(UserError, match=r"saved without optimizer state"):
        backend.load("d", tmp_path / "sampler", with_optimizer=True)


def test_sampler_checkpoint_loads_in_peft(backend: EngineBackend, tmp_path: Path) -> None:
    trained(backend, "a", rank=4, steps=2)
    result = run(backend, request("a", data("weights")))
    backend.save_for_sampler("a", tmp_path / "sampler")
    assert not (tmp_path / "sampler" / "training.pt").exists()
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_dir("qwen3")), str(tmp_path / "sampler")
    )
    for sample, logprobs in zip(data("weights"), result.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(sample.input_ids)[None]).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.target_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=1e-4, atol=1e-4)


def test_checkpoint_of_another_base_model_is_refused(backend: EngineBackend, start: Start, tmp_path: Path) -> None:
    """Also of the same architecture with other weights. A copy of the base model is the same one."""
    trained(backend, "a")
    backend.save("a", tmp_path / "a")
    other = start(model=model_dir("qwen3", seed=1))
    with pytest.raises(
        UserError, match=r"the checkpoint is of the base model .* with other weights: load it on a server of its base"
    ):
        other.load("a", tmp_path / "a", with_optimizer=True)
    assert other.models == {}
    # In other files, as save_pretrained divides them.
    copy = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(model_dir("qwen3")).save_pretrained(copy, max_shard_size="20KB")
    assert len(list(copy.glob("*.safetensors"))) > 1
    assert start(model=str(copy)).load("a", tmp_path / "a", with_optimizer=True) == AdapterSpec(4, seed=7, alpha=32.0)


def test_checkpoints_are_refused(backend: EngineBackend, start: Start, tmp_path: Path) -> None:
    """A refused checkpoint changes nothing: the model trains on with its pending gradients."""
    for model in "ab":
        trained(backend, model)
        run(backend, request(model, data("weights")))
    backend.save("a", tmp_path / "a")

    def damaged(name: str, file: str, change: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for each in (tmp_path / "a").iterdir():
            (folder / each.name).write_bytes(each.read_bytes())
        (folder / file).write_bytes(change((folder / file).read_bytes()))
        return folder

    def without_description(content: bytes) -> bytes:
        manifest = json.loads(content)
        del manifest["about"]["tinker"]
        return json.dumps(manifest).encode()

    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "missing": "is no complete checkpoint",
        tmp_path / "empty": "is no complete checkpoint",
        damaged("short", "adapter_model.safetensors", lambda x: x[:-8]): "adapter_model.safetensors is damaged",
        damaged("bit", "training.pt", lambda x: x[:900] + bytes([x[900] ^ 1]) + x[901:]): "training.pt is damaged",
        damaged("manifest", "manifest.json", lambda x: x[:-9]): "manifest.json is damaged",
        damaged("foreign", "manifest.json", without_description): "was not saved by this server",
    }
    for folder, message in cases.items():
        for model in "ac":
            with pytest.raises(UserError, match=message):
                backend.load(model, folder, with_optimizer=True)
    small = start(max_rank=2)
    with pytest.raises(UserError, match=r"lora_config.rank = 4: choose a rank from 1 to 2"):
        small.load("a", tmp_path / "a", with_optimizer=True)
    full = start(adapter_memory_mb=1)
    trained(full, "big", rank=60, steps=0)
    with pytest.raises(UserError, match=r"memory is short"):
        full.load("a", tmp_path / "a", with_optimizer=True)
    assert len(full.group.adapters.names) == 2
    # In place of a model, its memory and its number are available.
    full.load("big", tmp_path / "a", with_optimizer=True)
    alone = start(max_models=1)
    trained(alone, "a", steps=0)
    alone.load("a", tmp_path / "a", with_optimizer=True)
    with pytest.raises(UserError, match=r"the server has 1 models, and can have 1"):
        alone.load("b", tmp_path / "a", with_optimizer=True)
    assert backend.optim_step("a", STEP) == backend.optim_step("b", STEP)
    assert same(weights(backend, "a"), weights(backend, "b"))


def test_files_are_written_once_and_appear_complete(backend: EngineBackend, tmp_path: Path) -> None:
    """A folder with other content is not replaced."""
    trained(backend, "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds something other than a checkpoint"):
        backend.save("a", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_checkpoint_that_the_server_does_not_see(
    backend: EngineBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes on another node, into a folder that is not shared."""
    trained(backend, "a")
    monkeypatch.setattr(type(backend.group.adapters), "save", lambda *_, **__: None)
    with pytest.raises(
        ServerError, match=r"not visible to the server: put --root on a file system that all nodes share"
    ):
        backend.save("a", tmp_path / "a")


def test_load_replaces_pending_gradients(backend: EngineBackend, tmp_path: Path) -> None:
    trained(backend, "a")
    backend.save("a", tmp_path / "a")
    run(backend, request("a", data("weights")))
    backend.load("a", tmp_path / "a", with_optimizer=True)
    assert not backend.models["a"].pending
    assert backend.optim_step("a", STEP) == {"grad_norm:mean": 0.0}
    result = backend.forward([request("a", data("weights"))])[0]
    assert isinstance(result, PassResult)
