"""Updates that send an engine's adapter alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal import FinetuneSpec, LoRAConfig, OptimizerConfig, TrainEngine, TrainEngineConfig, create_engine
from areal.inference.http import VLLM, SGLang
from areal.inference.protocol import Completion
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import wait_until
from areal.tests.harness.servers.rollout_http import PROMPT, Background, Process, run, weights
from areal.tests.harness.tiny import global_batch, loss, started
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless
from areal.trainer.rollout.sequence import Sequence

TOKENS, LOAD, LOAD_ADAPTER = "/inference/v1/generate", "/collective_rpc", "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"


@pytest.fixture
def engine() -> Iterator[TrainEngine]:
    """An engine with an adapter that has been trained."""
    lora = LoRAConfig(rank=4, target_modules=("q_proj", "v_proj", "down_proj"))
    made = create_engine(
        TrainEngineConfig(path=model_dir("qwen3"), dtype="float32", lora=lora, optimizer=OptimizerConfig(lr=3e-2))
    )
    made.initialize(FinetuneSpec(total_train_steps=20))
    for seed in range(2):
        made.train_batch(global_batch(seed), loss)
    yield made
    made.destroy()


def error(engine: TrainEngine, answer: Completion) -> float:
    """Return the largest difference between an answer's log-probs and the engine's, in nats."""
    sample = Sequence.single(PROMPT, answer, reward=0.0).sample()
    logprobs = engine.forward_batch([sample])[0]
    return float((logprobs - sample["rollout_logprobs"])[sample["loss_mask"] > 0].abs().max())


def test_adapter_is_sent_alone_and_answers_under_its_name(
    make_vllm: Make, vllm: Process, engine: TrainEngine, tmp_path: Path
) -> None:
    rollout = make_vllm(vllm, dialect=VLLM(adapter="policy"))
    (before,) = run(rollout.generate(PROMPT, endless(6, seed=1)))
    assert before.versions == (0,) * 6
    assert error(engine, before) > 1e-3, "the model without the adapter"
    for version in (1, 2, 3):
        engine.train_batch(global_batch(), loss)
        rollout.sync(engine, version)
        (answer,) = run(rollout.generate(PROMPT, endless(6, seed=version)))
        assert answer.versions == (version,) * 6
        assert error(engine, answer) < 1e-4
    assert (vllm.calls(LOAD_ADAPTER), vllm.calls(LOAD)) == (3, 0)
    folder = tmp_path / "weights" / "version-00000003"
    assert sorted(path.name for path in folder.parent.glob("version-*")) == ["version-00000002", folder.name]
    # No merged weights are written.
    assert {file.name for file in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}
    sent = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    model = sum(x.nbytes for _, x in engine.named_tensors())
    assert sent < model / 5, f"{sent} bytes sent, and the model has {model}"


def test_vllm_reads_an_adapter_once(make_vllm: Make, vllm: Process, engine: TrainEngine, tmp_path: Path) -> None:
    """Its folder may be removed then."""
    rollout = make_vllm(vllm, dialect=VLLM(adapter="policy"))
    for version in (1, 2):
        engine.train_batch(global_batch(version), loss)
        engine.adapters.save("default", tmp_path / str(version))
        # A request whose reply is lost has its effect: the name is taken.
        if version == 2:
            vllm.lose(LOAD_ADAPTER)
        rollout.load(tmp_path / str(version), version)
        run(rollout.generate(PROMPT, endless(6, seed=version)))
        assert vllm.told()["adapter_reads"] == vllm.calls(LOAD_ADAPTER)
        shutil.rmtree(tmp_path / str(version))
        (answer,) = run(rollout.generate(PROMPT, endless(6, seed=version)))
        assert answer.versions == (version,) * 6
        assert error(engine, answer) < 1e-4
    assert (vllm.calls(UNLOAD_ADAPTER), vllm.calls(LOAD_ADAPTER)) == (3, 3)


def test_failed_load_of_an_adapter_leaves_the_one_before(
    make_vllm: Make, vllm: Process, engine: TrainEngine, tmp_path: Path
) -> None:
    """The load has removed it, and it is loaded again."""
    rollout = make_vllm(vllm, dialect=VLLM(adapter="policy"))
    missing, good = tmp_path / "missing", tmp_path / "good"
    engine.adapters.save("default", good)
    for version in (1, 2):
        with pytest.raises(RuntimeError, match=r"Loading lora policy failed: No adapter found"):
            rollout.load(missing, version)
        if version == 2:
            (answer,) = run(rollout.generate(PROMPT, endless(6, seed=1)))
            assert answer.versions == (1,) * 6
            assert error(engine, answer) < 1e-4
        # The next attempt succeeds, of the first version too.
        rollout.load(good, version)
        (answer,) = run(rollout.generate(PROMPT, endless(6, seed=1)))
        assert answer.versions == (version,) * 6
        assert error(engine, answer) < 1e-4


def test_request_under_way_goes_on_with_the_next_adapter(make_vllm: Make, vllm: Process, engine: TrainEngine) -> None:
    """The server would end it with the adapter with which it began, under the label of the next one."""
    rollout = make_vllm(vllm, dialect=VLLM(adapter="policy"))
    rollout.sync(engine, 1)
    engine.train_batch(global_batch(), loss)
    vllm.tell(step_seconds=0.05)
    drawn = vllm.drawn()
    background = Background(rollout.generate(PROMPT, endless(40, seed=1)))
    wait_until(lambda: vllm.drawn() >= drawn + 2)
    rollout.sync(engine, 2)
    (answer,) = background.result()
    assert set(answer.versions) == {1, 2}
    assert list(answer.versions) == sorted(answer.versions)
    assert vllm.calls(TOKENS) == 2
    later = answer.versions.index(2)
    sample = Sequence.single(PROMPT, answer, reward=0.0).sample()
    difference = (engine.forward_batch([sample])[0] - sample["rollout_logprobs"])[sample["loss_mask"] > 0].abs()
    assert difference[later:].max() < 1e-4
    assert difference[:later].max() > 1e-4
    assert torch.isfinite(difference).all()


def test_sglang_loads_the_adapter_alone(make_vllm: Make, sglang: Process, engine: TrainEngine) -> None:
    """Under a name that must be free, and not while a request has it."""
    rollout = make_vllm(sglang, dialect=SGLang(adapter="policy"))
    (before,) = run(rollout.generate(PROMPT, endless(6, seed=1)))
    assert error(engine, before) > 1e-3, "the model without the adapter"
    rollout.sync(engine, 1)
    (answer,) = run(rollout.generate(PROMPT, endless(6, seed=1)))
    assert error(engine, answer) < 1e-4
    engine.train_batch(global_batch(), loss)
    sglang.tell(step_seconds=0.05)
    drawn = sglang.drawn()
    background = Background(rollout.generate(PROMPT, endless(20, seed=1)))
    wait_until(lambda: sglang.drawn() >= drawn + 2)
    # A request whose reply is lost has its effect.
    sglang.lose("/load_lora_adapter")
    try:
        rollout.sync(engine, 2)
    except RuntimeError as failed:
        raise AssertionError("the name was not free") from failed
    (answer,) = background.result()
    assert set(answer.versions) == {1, 2}
    sglang.tell(step_seconds=0)
    (answer,) = run(rollout.generate(PROMPT, endless(6, seed=2)))
    assert answer.versions == (2,) * 6
    assert error(engine, answer) < 1e-4
    assert (sglang.calls("/unload_lora_adapter"), sglang.calls("/load_lora_adapter")) == (3, 3)
    assert sglang.calls("/update_weights_from_disk") == 0


def test_adapter_that_an_expression_selects_is_sent_with_the_names_of_its_layers(
    make_vllm: Make, sglang: Process, tmp_path: Path
) -> None:
    """SGLang refuses the expression."""
    lora = LoRAConfig(rank=4, target_modules=r".*layers\.1.*\.[qv]_proj")
    with started("fsdp:d1", path=model_dir("qwen3"), lora=lora) as engine:
        make_vllm(sglang, dialect=SGLang(adapter="policy")).sync(engine, 1)
        engine.adapters.save("default", tmp_path / "adapter")
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        names = [f"model.layers.1.self_attn.{each}_proj" for each in "qv"]
        assert config["target_modules"] == names
        engine.adapters.load("again", tmp_path / "adapter")
    assert sglang.calls("/load_lora_adapter") == 1


def test_update_of_the_model_under_an_adapter_is_refused(
    make_vllm: Make, vllm: Process, engine: TrainEngine, tmp_path: Path
) -> None:
    """The server would add the adapter to weights that have it."""
    engine.adapters.save("default", tmp_path / "adapter")
    vllm.post(LOAD_ADAPTER, lora_name="policy", lora_path=str(tmp_path / "adapter"))
    rollout = make_vllm(vllm, dialect=VLLM("policy"))
    with pytest.raises(ValueError, match=r"VLLM.model = 'policy' is an adapter, which .* would add"):
        rollout.update(weights(1), 1)
    assert vllm.calls("/pause") == 0
    (answer,) = run(rollout.generate(PROMPT, endless(6)))
    assert error(engine, answer) < 1e-4
    rollout.close()
    with pytest.raises(ValueError, match=r"a stream of tensors lacks the adapter's configuration: call sync\(\)"):
        make_vllm(vllm, dialect=VLLM(adapter="policy")).update(weights(1), 1)
    with pytest.raises(ValueError, match=r"VLLM: model = 'a' and adapter = 'b'"):
        VLLM("a", adapter="b")


def test_servers_that_cannot_load_adapters_are_refused(make_vllm: Make, vllm: Process) -> None:
    vllm.tell(without=[LOAD_ADAPTER])
    with pytest.raises(ValueError, match=r"VLLM.adapter = 'policy': the server cannot load adapters.*--enable-lora"):
        make_vllm(vllm, dialect=VLLM(adapter="policy"))
    vllm.tell(without=[])
    with pytest.raises(ValueError, match=r"VLLM.model = 'policy': the server has "):
        make_vllm(vllm, dialect=VLLM("policy"))
