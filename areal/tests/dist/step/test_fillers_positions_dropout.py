"""Properties of fillers, learned positions and dropout that no other test covers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import Batch, MicroBatch, TokenOutputs
from areal.tests.harness.tiny import Sample, global_batch, gpt2_dir, layouts, local_batch, loss, started
from areal.tests.harness.world import world


@torch.no_grad()
def plain_logprobs(path: str, samples: list[Sample]) -> list[Tensor]:
    """Compute log-probs of the next tokens with transformers, one sequence at a time; 0 at the last position."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    result = []
    for sample in samples:
        ids = sample["input_ids"]
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        result.append(torch.cat([logprobs[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)]))
    return result


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    errors = [(a - b).abs().max().item() for a, b in zip(actual, expected, strict=True)]
    assert max(errors) <= 1e-4, f"by sequence: {errors}"


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:d2"])
def test_filler_is_not_passed_to_process_function(backend: str) -> None:
    with started(backend, mb_spec={"max_tokens_per_mb": 40}) as engine:
        batch = global_batch()[:1] if world().rank else global_batch()[1:]
        mbs = engine.microbatches(batch)
        assert [mb.filler for mb in mbs] == [world().rank == 1 and i > 0 for i in range(len(mbs))]
        assert len(mbs) > 2
        seen: list[tuple[int, tuple[int, ...]]] = []

        def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, int]:
            seen.append((mb.index, mb.seqlens))
            return loss(outputs, mb.data), mb.index

        assert engine.forward_backward_batch(mbs, process) == [mb.index for mb in mbs.real]
        assert seen == [(mb.index, mb.seqlens) for mb in mbs.real]
        engine.zero_grad()
        lengths: list[int] = []

        def counting(outputs: TokenOutputs, data: Batch) -> Tensor:
            lengths.append(len(data["input_ids"]))
            return loss(outputs, data)

        engine.train_batch(batch, counting)
        # The first rank also probes the function, once, on the halves of a micro-batch.
        if world().rank == 0:
            assert lengths[1] + lengths[2] == lengths[3]
            del lengths[1:3]
        assert lengths == [mb.n_tokens for mb in mbs.real]


# Megatron and pipelines support no family with learned positions
@pytest.mark.parametrize("backend", layouts(1, 2, engine="fsdp", but=("fsdp:p2",)))
def test_learned_positions_restart_per_sequence(backend: str) -> None:
    """Rotary positions are relative, so most families would not show a wrong offset."""
    path = gpt2_dir()
    with started(backend, path=path, fsdp={"attention": "packed"}, mb_spec={}) as engine:
        batch = local_batch(engine, global_batch())
        assert_same(engine.forward_batch(batch), plain_logprobs(path, batch))


# Megatron and pipelines support no family with dropout
@pytest.mark.parametrize("backend", layouts(1, 2, engine="fsdp", but=("fsdp:p2",)))
def test_eval_disables_dropout_and_restores_it(backend: str) -> None:
    path = gpt2_dir(resid_pdrop=0.2)
    with started(backend, path=path) as engine:
        batch = local_batch(engine, global_batch())

        def trained() -> float:
            result = engine.forward_backward(batch, loss).loss
            engine.zero_grad()
            return result

        before = trained()
        assert_same(engine.forward_batch(batch), plain_logprobs(path, batch))
        evaluated = engine.eval_batch(batch, loss).loss
        assert engine.eval_batch(batch, loss).loss == evaluated
        assert len({before, evaluated, trained(), trained()}) == 4
