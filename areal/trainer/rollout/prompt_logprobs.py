"""Log-probs of given tokens, by one forward without generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from areal.trainer.rollout.protocol import Sampling, TopTokens
from areal.trainer.rollout.sampler import log_probs, top_tokens


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probs of the tokens of a prompt after the first one, in nats.

    Attributes:
        logprobs: one for each token but the first.
        top: the most likely tokens in their places; empty if none were asked for.
    """

    logprobs: tuple[float, ...]
    top: tuple[TopTokens, ...] = ()


@torch.no_grad()
def prompt_logprobs(model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling) -> PromptLogprobs:
    """Compute the log-probs of a prompt's tokens under the distribution from which ``sampling`` draws.

    Args:
        model: in evaluation mode. Its attention may be that of continuous batching.
        prompt: token ids.
        sampling: temperature, ``top_p``, ``top_k`` and ``top_logprobs`` are read.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    with _plain_attention(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    # Log-probs of greedy requests are those at temperature 1.
    logprobs = log_probs(logits, [sampling] * len(logits)) if len(logits) else logits
    chosen = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
    return PromptLogprobs(tuple(chosen.tolist()), tuple(top_tokens(logprobs, sampling.top_logprobs)))


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model attends without the paged cache."""
    paged = model.config._attn_implementation
    model.set_attn_implementation(paged.removeprefix("paged|"))
    try:
        yield
    finally:
        model.set_attn_implementation(paged)
