"""From a run to a deployment: ``weights.download`` and ``weights.build_hf_model`` of the published cookbook, unmodified, give a model
with the log-probs of the server's sampler.

``make test-cookbook`` makes the environment, and runs this test.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from areal.engine.model.untied_copy import write_untied_copy
from areal.tests.tinker.cookbook.environment import PYTHON, output_of
from areal.tests.tinker.sdk.server import ServerProcess, model_with_tokenizer

CLIENT = Path(__file__).with_name("export_client.py")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs what `make test-cookbook` makes"),
]


def peft_logprobs(base: str, adapter: Path, tokens: torch.Tensor) -> np.ndarray:
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    ).eval()
    with torch.no_grad():
        scores = model(tokens[None]).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", ["qwen3", "smollm"])
@pytest.mark.filterwarnings("ignore:Model ")
def test_built_model_has_the_log_probs_of_the_sampler(family: str, tmp_path: Path) -> None:
    """A tied model (smollm) is built from an untied copy. The tied directory itself is refused, and not merged into another model."""
    model = model_with_tokenizer(tmp_path / "base", family)
    bases = {"base": model}
    if family == "smollm":
        write_untied_copy(model, tmp_path / "untied")
        bases["untied"] = str(tmp_path / "untied")
    server = ServerProcess(tmp_path / "server", model, name=model)
    try:
        given = {"model": model, "bases": bases, "folder": str(tmp_path / "client")}
        found = json.loads(output_of(server, str(CLIENT), json.dumps(given)).splitlines()[-1])
    finally:
        assert server.stop() == 0, server.text
    # Both ways of a download have the same two files, and the temporary export is deleted.
    assert found["adapter"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert found["adapter"] == found["exported"]
    assert found["left"] == ["final", "plain"]
    # Models that were built.
    expected = np.array(found["sampler"])
    built = {name: np.abs(np.array(logprobs) - expected).max() for name, logprobs in found["built"].items()}
    print(family, built, found["refused"])
    assert set(built) == ({"untied"} if family == "smollm" else {"base"})
    assert max(built.values()) < 1e-4
    assert all("'lm_head.weight' which does not exist" in error for error in found["refused"].values())
    # The cookbook's conversion for inference servers serves the head, too.
    tokens = torch.tensor(np.random.default_rng(0).integers(3, 100, 40))
    assert np.abs(peft_logprobs(model, tmp_path / "client" / "peft", tokens) - expected).max() < 1e-4
