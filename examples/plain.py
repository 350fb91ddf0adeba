"""The model in plain transformers: it generates answers, and its log-probs are compared with an engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from chat import ChatFormat
from tasks import Problem
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from areal.api import NamedTensor


def model_from_weights(
    path: str, weights: Iterable[NamedTensor], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return a plain model with an engine's weights, taken from its stream without a file.

    Args:
        path: directory or hub name of the model's config.
        weights: full tensors under their Hugging Face names, as ``engine.named_tensors()`` streams them.
        dtype: dtype of the plain model.
        device: device of the plain model.

    Raises:
        RuntimeError: the stream lacks a weight, or has an unknown one.
    """
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights}
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise RuntimeError(f"the engine's weights are not those of {path}: {wrong}")
    return _for_inference(model, device)


def model_from_directory(path: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model in a directory, as any user of transformers would."""
    return _for_inference(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), device)


def _for_inference(model: torch.nn.Module, device: torch.device) -> Any:
    """Move a model to a device, in evaluation mode."""
    return model.to(device).eval()


@torch.no_grad()
def write_answers(
    model: PreTrainedModel, chat: ChatFormat, problems: Sequence[Problem], max_new_tokens: int, batch_size: int
) -> Iterator[list[str]]:
    """Generate answers with greedy decoding.

    Yields:
        The answers to the next ``batch_size`` problems, in order.
    """
    pad = chat.tokenizer.pad_token_id
    pad = chat.tokenizer.eos_token_id if pad is None else pad
    for start in range(0, len(problems), batch_size):
        chunk = problems[start : start + batch_size]
        prompts = [torch.tensor(chat.prompt_ids(problem)) for problem in chunk]
        width = max(len(prompt) for prompt in prompts)
        # Padded on the left, so that all answers begin at the same column.
        ids = torch.full((len(prompts), width), pad)
        mask = torch.zeros((len(prompts), width), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        end = chat.end_of_turn(chunk[0])
        generation = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end, pad_token_id=pad
        )
        tokens = _generate(model, ids.to(model.device), mask.to(model.device), generation)
        yield [chat.text(row) for row in tokens[:, width:].tolist()]


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, samples: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Return log-probs of each next token, computed one sequence at a time, unpadded; softmax in float32.

    Returns:
        For each sample float32 ``[S_i]`` on the CPU. Index ``t`` refers to the token at ``t + 1``; the last is 0.
    """
    results = []
    for sample in samples:
        ids = sample["input_ids"].to(model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        results.append(torch.cat((chosen, chosen.new_zeros(1))).cpu())
    return results


def _generate(model: Any, ids: Tensor, mask: Tensor, generation: GenerationConfig) -> Tensor:
    return model.generate(ids, attention_mask=mask, generation_config=generation)
