"""The model's own head compared with the logits of the model, and the layouts and options that it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal.api import IGNORE_INDEX, ParallelDims
from areal.engine.model import heads
from areal.engine.model.forward_plan import inspect_model, plan_forward
from areal.engine.model.heads import OwnHead, decoder_of
from areal.engine.model.probe import probe
from areal.engine.model.tiny_config import VOCABULARY, shrink


def config(family: str, **fields: object) -> PretrainedConfig:
    return AutoConfig.for_model(family, **fields)


def tiny(family: str, **fields: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shrink(config(family, **fields)), dtype=torch.float64).eval()


@pytest.fixture
def electra() -> PreTrainedModel:
    return tiny("electra", is_decoder=True)


def hidden_and_logits(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(0))
    hidden = decoder_of(model)(input_ids=ids).last_hidden_state[0]
    return hidden, model.generator_lm_head(model.generator_predictions(hidden))


@pytest.mark.parametrize("per_token", [False, True], ids=["one-temperature", "per-token"])
def test_own_head_computes_all_outputs_chunk_by_chunk(
    electra: PreTrainedModel, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_CHUNK_TOKENS", 4)
    hidden, logits = hidden_and_logits(electra)
    temperature = torch.linspace(0.5, 2.0, 11, dtype=torch.float64) if per_token else 0.7
    expected = (logits / (temperature[:, None] if per_token else temperature)).log_softmax(-1)
    targets = torch.arange(3, 14)
    targets[5] = IGNORE_INDEX

    out = OwnHead(electra).outputs(hidden, targets, temperature=temperature, entropy=True, topk=3)
    picked = expected.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets == IGNORE_INDEX, 0.0)
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(out.logprobs, picked)
    torch.testing.assert_close(out.entropy, entropy)
    torch.testing.assert_close(out.topk.logprobs, expected.topk(3).values)
    torch.testing.assert_close(OwnHead(electra).logits(hidden, temperature).log_softmax(-1), expected)

    # Gradients reach the hidden states and the weights of the head, bias included.
    parameters = [hidden, *electra.generator_predictions.parameters(), electra.generator_lm_head.bias]
    ours = torch.autograd.grad((out.logprobs + 0.3 * out.entropy).sum(), parameters)
    theirs = torch.autograd.grad((picked + 0.3 * entropy).sum(), parameters)
    torch.testing.assert_close(ours, theirs)


def test_own_head_takes_several_targets_and_none(electra: PreTrainedModel) -> None:
    hidden, logits = hidden_and_logits(electra)
    targets = torch.randint(0, VOCABULARY, (11, 2))
    targets[3, 1] = VOCABULARY  # outside of the vocabulary
    out = OwnHead(electra).outputs(hidden, targets, temperature=1.0, entropy=False, topk=None)
    assert out.logprobs.shape == (11, 2)
    assert out.logprobs.isnan().nonzero().tolist() == [[3, 1]]
    torch.testing.assert_close(out.logprobs[:3], logits.log_softmax(-1)[:3].gather(1, targets[:3]))
    assert OwnHead(electra).outputs(hidden, None, temperature=1.0, entropy=False, topk=2).logprobs is None


def test_temperature_of_own_head_is_not_rounded(electra: PreTrainedModel) -> None:
    """A number and the same number for each token: of hidden states in bfloat16, 0.7 would become 0.69921875."""
    model = copy.deepcopy(electra).to(torch.bfloat16)
    hidden = 4 * torch.randn(64, model.config.hidden_size, dtype=torch.bfloat16)
    targets = torch.randint(0, VOCABULARY, (64,))
    by_number, by_token = (
        OwnHead(model).outputs(hidden, targets, temperature=temperature, entropy=True, topk=None)
        for temperature in (0.7, torch.full((64,), 0.7))
    )
    assert torch.equal(by_number.logprobs, by_token.logprobs)
    assert torch.equal(by_number.entropy, by_token.entropy)


def test_own_head_without_tokens_uses_its_parameters(electra: PreTrainedModel) -> None:
    hidden, _ = hidden_and_logits(electra)
    targets = torch.empty(0, dtype=torch.int64)
    out = OwnHead(electra).outputs(hidden[:0], targets, temperature=torch.ones(0), entropy=True, topk=None)
    assert out.logprobs.shape == out.entropy.shape == (0,)
    grads = torch.autograd.grad(out.logprobs.sum(), list(electra.generator_predictions.parameters()))
    assert all(not grad.any() for grad in grads)


def test_own_head_restores_the_decoder(electra: PreTrainedModel) -> None:
    hidden, logits = hidden_and_logits(electra)
    OwnHead(electra).logits(hidden, 1.0)
    assert "forward" not in vars(decoder_of(electra))
    torch.testing.assert_close(hidden_and_logits(electra)[1], logits)


def test_vocabulary_of_own_head_is_that_of_its_logits() -> None:
    if "inkling_text" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no model type inkling_text")
    fields = shrink(config("inkling_text"))
    fields.unpadded_vocab_size = VOCABULARY - 7
    model = AutoModelForCausalLM.from_config(fields)
    assert OwnHead(model).vocab_size(VOCABULARY) == VOCABULARY - 7


@pytest.mark.parametrize(
    ("family", "own_head"), [("granite", False), ("gemma2", False), ("cohere", False), ("recurrent_gemma", True)]
)
def test_probe_chooses_the_head(family: str, own_head: bool) -> None:
    result = probe(config(family), None)
    assert (result.head, result.own_head) == (None, own_head)


def test_pipelines_and_tensor_parallelism_refuse_own_heads() -> None:
    for layout in ("fsdp:p2", "fsdp:t2"):
        with pytest.raises(ValueError, match=f"more than a product with a weight, which {layout} cannot split"):
            plan_forward(config("electra", is_decoder=True), "auto", ParallelDims.parse(layout))


def test_product_in_float32_refuses_own_head() -> None:
    dims = ParallelDims.parse("fsdp:d1")
    with pytest.raises(ValueError, match="fp32_head = True, but model_type = 'electra'"):
        plan_forward(config("electra", is_decoder=True), "auto", dims, fp32_head=True)
    assert not plan_forward(config("llama"), "auto", dims, fp32_head=True).own_head


def test_model_that_cannot_be_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.engine.model.probe.tiny_configs", lambda config: iter(()))
    with pytest.raises(ValueError, match="its numbers cannot be checked, a tiny copy of it does not run"):
        inspect_model(config("mistral"))


@pytest.mark.parametrize("family", ["modernbert-decoder", "llama4_text", "opt", "electra"])
def test_decoder_is_a_model_inside_of_the_model(family: str) -> None:
    model = tiny(family)
    assert type(decoder_of(model)).__name__.endswith(("Model", "Decoder"))
