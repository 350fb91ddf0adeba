"""Log-probs of prompts of model types whose forwards reach decoder and head in different ways, a few positions at a time."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.inference.local.adapter_router import AdapterRouter
from areal.inference.local.prompt_logprobs import PromptScorer
from areal.inference.protocol import Sampling
from areal.tests.zoo.configs import tiny_config

FAMILIES = ["cohere2", "gemma2", "granite", "llama4_text", "opt"]
"""With factors and caps of logits, without the attribute that ``base_model`` reads, and with a decoder inside of the base model."""


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_a_long_prompt_are_those_of_a_plain_forward(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float64).eval()
    ids = torch.randint(3, 60, (13,))
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, ids[1:, None]).squeeze(1)
    for most in (64, 5):
        scorer = PromptScorer(model, AdapterRouter(model), most, contextlib.nullcontext)
        found = scorer.submit(ids.tolist(), Sampling(), None).result(60)
        scorer.close()
        torch.testing.assert_close(torch.tensor(found.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-5)
