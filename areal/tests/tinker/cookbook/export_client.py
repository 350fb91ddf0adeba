"""Client of ``test_export.py``, in the environment of the cookbook: train an adapter, download it, and build models of it.

Takes a JSON object as its argument: ``model`` (base model of the server), ``bases`` (directories to merge into, by name) and ``folder`` (of
all that is written). The last line of its output is a JSON object: log-probs ``[T]`` of the sampler and of each model that was built,
``refused`` (error by name of the base), and names of files.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsMergeError
from transformers import AutoModelForCausalLM

TOKENS = np.random.default_rng(0).integers(3, 100, 40).tolist()


def logprobs(folder: Path) -> list[float]:
    """Return the log-probs of the tokens after the first, of a model directory."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        scores = model(ids[None]).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, ids[1:, None])[:, 0].tolist()


def trained(client: Any, model: str) -> Any:
    """Return a training client of an adapter with the SDK's default ``LoraConfig``, after some steps."""
    trainer = client.create_lora_training_client(base_model=model)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)},
    )
    for _ in range(3):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return trainer


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    client = tinker.ServiceClient()
    trainer = trained(client, given["model"])
    saved = trainer.save_state("final").result().path
    exported = trainer.save_weights_external("plain").result().path
    sampler = trainer.save_weights_and_get_sampling_client()
    result: dict[str, Any] = {"refused": {}, "built": {}}
    result["sampler"] = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]
    # A training checkpoint is exported encrypted, an export is downloaded as it is.
    for name, path in (("adapter", saved), ("exported", exported)):
        weights.download(tinker_path=path, output_dir=str(folder / name))
        result[name] = {file.name: file.read_bytes().hex() for file in (folder / name).iterdir()}
    for name, base in given["bases"].items():
        options = {"base_model": base, "adapter_path": str(folder / "adapter")}
        try:
            weights.build_hf_model(**options, output_path=str(folder / name))
            result["built"][name] = logprobs(folder / name)
        except WeightsMergeError as error:
            result["refused"][name] = str(error)
    weights.build_lora_adapter(
        base_model=given["model"], adapter_path=str(folder / "adapter"), output_path=str(folder / "peft")
    )
    runs = client.create_rest_client().list_user_checkpoints().result().checkpoints
    result["left"] = sorted(entry.tinker_path.rpartition("/")[2] for entry in runs)
    print(json.dumps(result), flush=True)
    # Without finalizing the interpreter, where a daemon thread of the SDK can abort the process (CPython gh-87135).
    os._exit(0)


main()
