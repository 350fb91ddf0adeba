"""TRL's GRPO on an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: make test-trl")

from transformers import AutoModelForCausalLM

from areal import MicroBatchSpec
from areal.integrations.trl import EngineGRPOTrainer, checks
from areal.integrations.trl.checks import check
from areal.tests.trl import grpo_runs, tiny
from areal.tests.trl.curves import Curve
from areal.tests.trl.grpo_runs import config, on_engine, own

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"max_steps": 60},
    "grpo, two epochs": {
        "max_steps": 20,
        "loss_type": "grpo",
        "num_iterations": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
    },
    "cispo, entropy, top_p": {
        "loss_type": "cispo",
        "entropy_coef": 0.01,
        "temperature": 0.7,
        "top_p": 0.9,
        "mask_truncated_completions": True,
        "epsilon_high": 5.0,
    },
    "dr_grpo, sequences": {
        "loss_type": "dr_grpo",
        "importance_sampling_level": "sequence",
        "top_entropy_quantile": 0.5,
        "num_iterations": 2,
    },
    "bnpo, cosine, no clipping": {
        "loss_type": "bnpo",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_grad_norm": 0.0,
        "adam_beta2": 0.95,
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_curve_is_that_of_trl(path: str, tmp_path: Path, compare: Callable[..., Any], name: str) -> None:
    theirs = own(path, config(tmp_path, **SETTINGS[name]))
    ours = on_engine(path, config(tmp_path, **SETTINGS[name]))
    found = compare(f"GRPOTrainer, {name}", theirs, ours)
    assert theirs.rewards() == ours.rewards()
    assert len(set(ours.rewards())) > 3
    assert found["lr"] == 0
    assert max(found["loss"], found["grad norm"], found["entropy"], found["weights"]) < 2e-5


def test_the_curve_is_that_of_trl_with_a_rollout_engine(path: str, tmp_path: Path, compare: Callable[..., Any]) -> None:
    with tiny.local_rollout(path) as rollout:
        theirs = own(path, config(tmp_path), rollout)
    with tiny.local_rollout(path) as rollout:
        # TRL's samples of a process stay together, whatever the engine's own rules are.
        ours = on_engine(path, config(tmp_path), rollout, mb_spec=MicroBatchSpec(max_tokens_per_mb=64))
    found = compare("GRPOTrainer, LocalRollout in both", theirs, ours)
    assert theirs.rewards() == ours.rewards()
    assert max(found["loss"], found["grad norm"], found["entropy"], found["weights"]) < 2e-5


def test_the_curve_is_that_of_trl_on_two_ranks(path: str, tmp_path: Path, compare: Callable[..., Any]) -> None:
    curves = []
    for output, backend in (("own", ()), ("engine", ("--backend", "fsdp:d2"))):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launch, "-m", grpo_runs.__name__, path, str(tmp_path / output), *backend]
        root = Path(__file__).parents[3]
        subprocess.run(command, check=True, timeout=200, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
        curves.append(Curve(*torch.load(tmp_path / output)))
    found = compare("GRPOTrainer, 2 ranks (DDP, fsdp:d2)", *curves)
    assert curves[0].rewards() == curves[1].rewards()
    assert max(found["loss"], found["grad norm"], found["entropy"], found["weights"]) < 2e-5


def trainer(engine: Any, folder: Path, **changes: Any) -> EngineGRPOTrainer:
    options = {name: changes.pop(name) for name in ("tools", "peft_config", "eval_dataset") if name in changes}
    items = {"train_dataset": tiny.data_set(), "reward_funcs": tiny.reward, **options}
    return EngineGRPOTrainer(engine, None, print, args=config(folder, **changes), **items)


def test_the_model_of_trl_has_one_number_and_the_engine_is_saved(path: str, tmp_path: Path) -> None:
    with tiny.engine(path) as engine:
        made = trainer(engine, tmp_path)
        assert sum(weight.numel() for weight in made.model.parameters()) == 1
        made.save_model(str(tmp_path / "saved"))
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(weights[name], weight) for name, weight in engine.named_tensors())
        with pytest.raises(ValueError, match="resume_from_checkpoint"):
            made.train(resume_from_checkpoint=str(tmp_path / "saved"))


def test_evaluation_computes_the_loss_of_trl_and_leaves_no_gradient(path: str, tmp_path: Path) -> None:
    held_out = tiny.data_set().select(range(4))
    with tiny.local_rollout(path) as rollout:
        theirs = grpo_runs.own_trainer(path, config(tmp_path), rollout, eval_dataset=held_out).evaluate()
    with tiny.local_rollout(path) as rollout, tiny.engine(path) as engine:
        ours = grpo_runs.engine_trainer(engine, config(tmp_path), rollout, eval_dataset=held_out).evaluate()
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            engine.optimizer_step()
    assert theirs["eval_reward"] == ours["eval_reward"]
    assert theirs["eval_loss"] == pytest.approx(ours["eval_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.04}, r"GRPOConfig.beta = 0.04: it is not supported; leave it at 0.0"),
        ({"use_vllm": True}, r"GRPOConfig.use_vllm = True"),
        ({"weight_decay": 0.1}, r"GRPOConfig.weight_decay = 0.1"),
        ({"optim": "sgd"}, r"GRPOConfig.optim = <OptimizerNames.SGD: 'sgd'>: it is not supported"),
        ({"save_strategy": "steps"}, r"GRPOConfig.save_strategy = .*: TRL has no model to save: set it to 'no'"),
        ({"bf16": True}, r"GRPOConfig.bf16 = True: TrainEngineConfig.dtype is 'float32'"),
        ({"tools": [print]}, r"tools = .*: it needs TRL's model; leave it out"),
    ],
)
def test_options_are_refused_by_name(path: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with tiny.engine(path) as engine, pytest.raises(ValueError, match=message):
        trainer(engine, tmp_path, **changes)


@pytest.mark.parametrize(
    ("release", "tested"), [("1.16.0", True), ("1.16.1", False), ("1.15.2", False), ("2.0", False)]
)
def test_another_release_of_trl_warns_with_the_tested_range(tmp_path: Path, release: str, tested: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(config(tmp_path), (), {}, release)
    texts = [str(each.message) for each in caught if "areal" in str(each.message)]
    assert texts == ([] if tested else [f"trl = {release}: areal.integrations.trl was tested with 1.16.0 to 1.16.0"])
    assert checks.TESTED == ("1.16.0", "1.16.0")
