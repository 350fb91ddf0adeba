"""Images that vLLM gets beside tokens: its log-probs are those of transformers for the same pixels, also after an update of the tower."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLImageProcessorPil

from areal.inference.http import VLLM, HTTPRollout
from areal.tests.grid.models import tiny_model
from areal.tests.grid.vision_models import IMAGE_TOKEN, tokens
from areal.tests.harness.tiny import writing
from areal.tests.harness.world import locked, world
from areal.tests.unit.inference.local.image_prompts import SMALL, WIDE, prompt, rarely_drawing, whole_logprobs
from areal.tests.unit.inference.local.rollouts import assert_logprobs, tokenizer
from areal.tests.vllm import server
from areal.tests.vllm.answers import endless, run
from areal.tests.vllm.server import PLUGIN, PYTHON, VLLMProcess
from areal.utils.data.image_prompt import Prompt
from areal.weight_sync.apply import ModuleSource

TORCHVISION = PYTHON.parents[1] / "torchvision"
OPERATORS = PLUGIN.parent / "torchvision_operators"

pytestmark = [
    *server.marks,
    pytest.mark.skipif(not TORCHVISION.exists(), reason="needs torchvision beside vLLM: make test-vllm"),
]


def config() -> Qwen2VLConfig:
    """Heads of 64, as vLLM needs them on a CPU."""
    text = {
        "vocab_size": 112,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    vision = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "num_heads": 2}
    marks = {"video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    return Qwen2VLConfig(
        text_config=text,
        vision_config={**vision, "mlp_ratio": 2, "embed_dim": 128, "hidden_size": 128},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
        architectures=["Qwen2VLForConditionalGeneration"],
        **marks,
    )


def replica(seed: int) -> PreTrainedModel:
    return rarely_drawing(tiny_model(config(), seed).eval())


def served() -> str:
    """Return the directory of the model."""
    folder = world().cache / "vllm-images"
    with locked(folder):
        if not folder.exists():
            with writing():
                replica(0).save_pretrained(folder)
                tokenizer().save_pretrained(folder)
                # For the largest image that the server may get.
                size = {"shortest_edge": 64, "longest_edge": 4096}
                Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    return options("--no-mm-device-do-normalize")


def options(*flags: str) -> dict[str, Any]:
    return {
        "model": served(),
        "lora": False,
        "flags": ("--skip-mm-profiling", *flags),
        "environment": {"PYTHONPATH": f"{OPERATORS}:{TORCHVISION}"},
    }


PROMPTS: list[Prompt] = [
    prompt(5, WIDE, 4, SMALL, 3, seed=1),
    # The same tokens with other images, and the same prompt again.
    prompt(5, WIDE, 4, SMALL, 3, seed=1, pixels=2),
    prompt(5, WIDE, 4, SMALL, 3, seed=1),
    tokens(9, seed=3).tolist(),
    prompt(2, (1, 12, 12), 30, seed=4),
]


def test_log_probs_are_those_of_the_same_pixels(fresh: HTTPRollout) -> None:
    """Before an update and after it, which the tower has part in: the server must not use what it encoded before."""
    for version in range(2):
        if version:
            fresh.update(ModuleSource(replica(version)).named_tensors(), version)
        asked = [fresh.generate(each, endless(8, seed=i)) for i, each in enumerate(PROMPTS)]
        for given, answer in zip(PROMPTS, run(*asked), strict=True):
            assert answer.versions == (version,) * 8
            wanted = whole_logprobs(replica(version), given, answer)
            torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=0, atol=1e-4)


def test_a_server_that_would_normalise_images_is_named() -> None:
    """It does by default. Prompts of text are answered."""
    with closing(VLLMProcess(**options())) as other, HTTPRollout(other.url, VLLM(), model=other.model) as rollout:
        (answer,) = run(rollout.generate(PROMPTS[3], endless(4, seed=0)))
        assert_logprobs(answer, whole_logprobs(replica(0), PROMPTS[3], answer))
        with pytest.raises(ValueError, match="would normalise them a second time: start vLLM with --no-mm-device-do"):
            run(rollout.generate(PROMPTS[0], endless(4)))
