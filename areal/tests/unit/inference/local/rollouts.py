"""Rollouts in this process, and what their answers are compared with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from areal.api.weights import NamedTensor
from areal.inference.local.rollout import LocalRollout
from areal.inference.local.sampler import log_probs
from areal.inference.protocol import Completion, Sampling
from areal.tests.grid.models import FAMILIES, VOCAB, tiny_model
from areal.weight_sync.apply import ModuleSource

CONTEXT = 160
PROMPT = [(7 * i + 3) % VOCAB for i in range(41)]


def model(seed: int = 0) -> PreTrainedModel:
    return tiny_model(FAMILIES["qwen3"](), seed).eval()


def weights(seed: int) -> Iterator[NamedTensor]:
    return ModuleSource(model(seed)).named_tensors()


def rollout(replica: PreTrainedModel | None = None, **options: Any) -> LocalRollout:
    return LocalRollout(replica or model(), **{"max_context": CONTEXT, "max_requests": 24, **options})


def endless(*values: Any, **options: Any) -> Sampling:
    """Sampling parameters without stop tokens: every answer has ``max_new_tokens``."""
    return Sampling(*values, **{"stop_token_ids": (), **options})


def run(*work: Coroutine[Any, Any, Completion]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.wait_for(asyncio.gather(*work), 60)

    return asyncio.run(together())


def run_in_step(engine: LocalRollout, *work: Coroutine[Any, Any, Completion]) -> list[Completion]:
    """Run requests that begin with the same forward: all are there before it."""

    async def together() -> list[Completion]:
        with engine._paused():
            requests = [asyncio.ensure_future(each) for each in work]
            # Each runs until it waits for its answer.
            await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*requests), 60)

    return asyncio.run(together())


@torch.no_grad()
def plain_logprobs(
    replica: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
) -> Tensor:
    """Log-probs of an answer by one plain forward over prompt and answer."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = replica(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return log_probs(logits, [sampling] * len(tokens)).gather(1, torch.tensor([[t] for t in tokens])).squeeze(1)


def assert_logprobs(answer: Completion, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=0, atol=1e-5)


def after_forwards(replica: PreTrainedModel, count: int) -> threading.Event:
    """Set once the replica has been called ``count`` times."""
    event, calls = threading.Event(), [0]

    def called(*_: Any) -> None:
        calls[0] += 1
        if calls[0] >= count:
            event.set()

    replica.register_forward_hook(called)
    return event


WAYS = [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0), Sampling(temperature=0.7, top_k=9, top_p=0.8)]


class Reading:
    """An iterator that says whether it was read to its end."""

    def __init__(self, tensors: Iterator[NamedTensor]) -> None:
        self.tensors, self.ended = tensors, False

    def __iter__(self) -> Iterator[NamedTensor]:
        return self

    def __next__(self) -> NamedTensor:
        try:
            return next(self.tensors)
        except StopIteration:
            self.ended = True
            raise


TEXTS = ["a", "b", "ab", "stop", "St", "op", " ", "\n", "\n\n", "</", "tool", ">", "é", "日本", "🙂", "Answer", ":"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole strings, and of the bytes of characters that need two to four."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [byte_level.pre_tokenize_str(text)[0][0] for text in TEXTS]
    words += [character for text in ("é", "日", "🙂") for character in byte_level.pre_tokenize_str(text)[0][0]]
    letters = [character for character in sorted(pre_tokenizers.ByteLevel.alphabet()) if character.isascii()]
    names = list(dict.fromkeys([*words, *letters]))[:VOCAB]
    assert len(names) == VOCAB
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def shortest(tokens: tuple[int, ...], stop: tuple[str, ...]) -> int:
    """Return the number of tokens after which the text of all of them has a stop string."""
    counts = range(1, len(tokens) + 1)
    return next(n for n in counts if any(string in tokenizer().decode(list(tokens[:n])) for string in stop))
