"""verl's own SFT trainer on our engines, against verl's own engine: the same losses, gradient norms and learning rates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from areal.tests.harness.world import record
from areal.tests.verl.sft import Curve, train, write_chats, write_model

pytestmark = pytest.mark.timeout(900)

STEPS = 50
LAYOUTS = ("fsdp:d2", "fsdp:t2", "fsdp:p2", "fsdp:e2", "megatron:t2", "jax:d1")
HALF = STEPS // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return write_chats(folder, 64)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[bool, Path]:
    """A model without experts and one with."""
    return {experts: write_model(folder / f"model-{experts}", experts=experts) for experts in (False, True)}


@pytest.fixture(scope="module")
def references(folder: Path, data: Path, models: dict[bool, Path]) -> dict[bool, Curve]:
    """The curves of verl's own engine on one rank."""
    return {
        experts: train(folder / f"reference-{experts}", model, "verl", steps=STEPS, data=data)
        for experts, model in models.items()
    }


def assert_close(what: str, actual: Curve, expected: Curve) -> None:
    def error(name: str) -> float:
        return max(abs(a - b) for a, b in zip(getattr(actual, name), getattr(expected, name), strict=True))

    assert actual.lr == expected.lr
    errors = {name: error(name) for name in ("loss", "grad_norm", "validation")}
    record("verl's SFT trainer against verl's own engine", what, **{name: f"{x:.0e}" for name, x in errors.items()})
    assert errors["loss"] <= 1e-6
    assert errors["validation"] <= 1e-6
    assert errors["grad_norm"] <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_has_the_curve_of_its_own_engine(
    layout: str, folder: Path, data: Path, models: dict[bool, Path], references: dict[bool, Curve]
) -> None:
    experts = "e2" in layout
    curve = train(folder / layout.replace(":", "-"), models[experts], layout, steps=STEPS, data=data)
    assert (len(curve.loss), len(curve.validation)) == (STEPS, 2)
    assert_close(layout, curve, references[experts])


def test_trainer_resumes_on_another_layout(
    folder: Path, data: Path, models: dict[bool, Path], references: dict[bool, Curve]
) -> None:
    """With as many data-parallel ranks: verl saves its position in the data for each."""
    run = folder / "resumed"
    train(run, models[False], "fsdp:t2", f"trainer.save_freq={HALF}", steps=STEPS, data=data)
    middle = run / "checkpoints" / f"global_step_{HALF}"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={middle}")
    curve = train(run, models[False], "megatron:p2", *resume, steps=STEPS, data=data)
    expected = references[False]
    rest = Curve(expected.loss[HALF:], expected.grad_norm[HALF:], expected.lr[HALF:], expected.validation[1:])
    assert len(curve.loss) == STEPS - HALF
    assert_close(f"fsdp:t2 to step {HALF}, then megatron:p2", curve, rest)


@pytest.fixture(scope="module")
def adapter(folder: Path, models: dict[bool, Path]) -> Path:
    """An adapter that peft wrote, with random factors."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(models[False]), config).save_pretrained(folder / "adapter")
    return folder / "adapter"


def test_stored_adapter_has_the_curve_of_its_own_engine(
    folder: Path, data: Path, models: dict[bool, Path], adapter: Path
) -> None:
    # verl reads the path only if there is a rank.
    options = (f"model.lora_adapter_path={adapter}", "model.lora_rank=4", "model.lora_alpha=12", "optim.lr=3e-2")
    expected = train(folder / "lora-reference", models[False], "verl", *options, steps=10, data=data)
    assert expected.validation[-1] < expected.validation[0] - 0.005
    for layout in ("fsdp:d2", "megatron:t2"):
        curve = train(folder / f"lora-{layout.replace(':', '-')}", models[False], layout, *options, steps=10, data=data)
        assert_close(f"{layout}, a stored adapter", curve, expected)


@pytest.mark.parametrize(
    ("layout", "override", "message"),
    [
        ("fsdp:d1", "model.use_liger=true", "model.use_liger = True with engine.strategy = 'areal'"),
        ("fsdp:d1", "optim.optimizer=AdamW8bit", "optim.optimizer = 'AdamW8bit' with engine.strategy = 'areal'"),
        ("fsdp:d1", "engine.backend=fsdp:d2", "backend = 'fsdp:d2' takes 2 ranks, but the world has 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    layout: str, override: str, message: str, folder: Path, data: Path, models: dict[bool, Path]
) -> None:
    output = train(folder / "refused", models[False], layout, override, steps=2, data=data, check=False)
    assert message in str(output)
