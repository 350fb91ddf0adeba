"""Every causal language model of transformers is trained correctly, or refused when the engine is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from areal.api import FinetuneSpec, FSDPConfig, MicroBatchSpec, TrainEngineConfig
from areal.engine.registry import create_engine
from areal.tests.harness.world import locked
from areal.tests.zoo import table
from areal.tests.zoo.configs import FAMILIES
from areal.tests.zoo.examine import FAULTS, LENGTHS, LOGPROBS, compare, examine, reference, trained, write_model
from areal.utils.releases import installed_release

SAMPLE = (
    *("llama", "mistral", "gpt2", "granite", "gemma2", "cohere"),  # packed; scales and caps of logits
    *("bert", "electra", "recurrent_gemma", "inkling_text", "rembert"),  # logits that are more than a product
    *("mamba", "mbart", "rwkv", "hy_v4", "roberta"),  # weights that are read, shared or initialized in unusual places
    *("modernbert-decoder", "gemma3"),  # decoders under another name; layers that text does not use
    *("cpmant", "gemma4_unified_assistant"),  # refused
)
"""Families of every kind; they are examined first."""


@pytest.mark.world(1, timeout=150)
@pytest.mark.parametrize(
    "family",
    sorted(FAMILIES, key=lambda family: family not in SAMPLE),
)
def test_family_is_trained_correctly_or_refused(family: str) -> None:
    finding = examine(family)
    assert finding.verdict not in FAULTS, finding.why
    version, findings = table.read()
    # Another version of transformers may have other families, and other reasons.
    if version == transformers.__version__:
        assert finding == findings[family], "run `make test-zoo` to update the table"


@pytest.mark.world(1, timeout=150)
def test_layers_named_as_stacked_experts_are_trained_correctly() -> None:
    """Phi-3's gate_up_proj and down_proj are linear layers."""
    assert examine("phi3").verdict not in FAULTS


@pytest.mark.world(2, timeout=150)
@pytest.mark.parametrize("family", ["electra", "gemma3", "zamba"])
def test_two_ranks_have_the_gradients_of_transformers(family: str, tmp_path: Path) -> None:
    with locked(tmp_path / "model"):
        if not (tmp_path / "config.json").exists():
            write_model(family, str(tmp_path))
    expected = reference(str(tmp_path))
    mb_spec = MicroBatchSpec(max_tokens_per_mb=20)
    with create_engine(
        TrainEngineConfig(
            path=str(tmp_path), backend="fsdp:d2", dtype="float32", mb_spec=mb_spec, fsdp=FSDPConfig(text_only=True)
        )
    ) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=1))
        found = trained(engine)
        logprobs = list(expected[LOGPROBS].split([n - 1 for n in LENGTHS]))[engine.dp_rank :: 2]
        assert compare(found, {**expected, LOGPROBS: torch.cat(logprobs)}) == ""


def test_sample_is_in_the_mapping() -> None:
    assert len(set(SAMPLE)) == 20
    if installed_release("transformers") >= (5, 23):
        assert set(SAMPLE) <= set(FAMILIES)


def test_committed_table_has_every_family_and_no_fault() -> None:
    version, findings = table.read()
    if version == transformers.__version__:
        assert list(findings) == list(FAMILIES)
    assert not [family for family, finding in findings.items() if finding.verdict in FAULTS]
    assert table.PAGE.read_text() == table.render(version, findings)


def test_comparison_finds_differences_and_missing_gradients() -> None:
    one = {"log-probs": torch.ones(3), "weight": torch.ones(2), "bias": torch.full((2,), 0.1)}
    assert compare(one, one) == ""
    assert compare({**one, "log-probs": torch.tensor([1.0, 1.0, 1.01])}, one) == "log-probs differ by 0.01 nats"
    assert "weight differs" in compare({**one, "weight": torch.tensor([1.0, 1.01])}, one)
    assert "bias differs" in compare({**one, "bias": torch.zeros(2)}, one)
    assert "weight differs" in compare({**one, "weight": torch.full((2,), torch.nan)}, one)
    assert compare({k: v for k, v in one.items() if k != "bias"}, one) == "only transformers has a gradient of bias"
