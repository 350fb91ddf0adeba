"""Drawing tokens: the distribution, the sample_tokens itself, and what a request keeps of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from areal.inference.local.sampler import Request, RequestSampler, log_probs, noise_size, sample_tokens
from areal.inference.protocol import Sampling

WAYS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=2.0, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.7, top_k=9, top_p=0.6),
    Sampling(top_k=1),
    Sampling(top_k=1000),
    Sampling(top_p=1e-9),
]


def logits(rows: int, vocab: int = 50, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def by_transformers(row: Tensor, sampling: Sampling) -> Tensor:
    """Apply transformers' warpers to one row ``[V]``, in float64."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(min(sampling.top_k, len(row))))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(None, row.double().unsqueeze(0))[0].log_softmax(-1)


def test_sampling_distributions_equal_transformers() -> None:
    x = logits(len(WAYS))
    ours = log_probs(x, WAYS)
    assert ours.dtype == torch.float32
    for i, sampling in enumerate(WAYS):
        torch.testing.assert_close(ours[i].double(), by_transformers(x[i], sampling), rtol=0, atol=2e-6)
        assert torch.equal(ours[i], log_probs(x[i : i + 1], [sampling])[0])


def test_greedy_logprobs_ignore_temperature_top_k_and_top_p() -> None:
    x = logits(2)
    ours = log_probs(x, [Sampling(temperature=0, top_k=2, top_p=0.1), Sampling(temperature=0.5)])
    torch.testing.assert_close(ours[0], x[0].log_softmax(-1))
    torch.testing.assert_close(ours[1], (2 * x[1]).log_softmax(-1))


def test_top_k_and_top_p_keep_ties() -> None:
    x = torch.tensor([[0.0, 1.0, 1.0, 3.0, -1.0]]).repeat(2, 1)
    kept = log_probs(x, [Sampling(top_k=2), Sampling(top_p=0.8)]).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]] * 2


@pytest.mark.parametrize("vocab", [1, 2, 16, 17, 30])
def test_sampled_tokens_follow_the_distribution(vocab: int) -> None:
    count = 60_000
    logprobs = log_probs(logits(1, vocab, seed=vocab), [Sampling(top_k=20)])
    noise = torch.from_numpy(Request(Sampling(), seed=vocab).noise(count * noise_size(vocab))).view(count, -1)
    seen = sample_tokens(logprobs.expand(count, -1), noise).bincount(minlength=vocab).double()
    p = logprobs[0].double().exp()
    error = (seen - count * p).abs() / (count * p * (1 - p)).sqrt().clamp_min(1)
    assert error.max() < 4.5
    assert seen[p == 0].sum() == 0


def test_small_change_of_logits_changes_few_samples() -> None:
    count, x = 20_000, logits(1, 400)
    noise = torch.from_numpy(Request(Sampling(), seed=3).noise(count * noise_size(400))).view(count, -1)
    before, after = (log_probs(y, [Sampling()]) for y in (x, x + 0.02 * logits(1, 400, seed=1)))
    variation = float((before.exp() - after.exp()).abs().sum() / 2)
    changed = float(
        (sample_tokens(before.expand(count, -1), noise) != sample_tokens(after.expand(count, -1), noise))
        .double()
        .mean()
    )
    assert 0 < changed < 3 * variation


def test_noise_is_determined_by_seed_and_position() -> None:
    first, again, other = Request(Sampling(), 5), Request(Sampling(), 5), Request(Sampling(), 6)
    assert np.array_equal(first.noise(7), again.noise(7))
    second = first.noise(7)
    assert np.array_equal(second, again.noise(7))
    assert not np.array_equal(second, other.noise(7))
    many = other.noise(100_000)
    assert many.min() > 0
    assert abs(many.mean() - 1) < 0.02


@pytest.mark.parametrize("seed", [-1, 2**64 + 1])
def test_integer_seed_wraps_to_64_bits(seed: int) -> None:
    assert np.array_equal(Request(Sampling(), seed).noise(4), Request(Sampling(), seed % 2**64).noise(4))


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_seed_bit_changes_the_noise(bit: int) -> None:
    assert not np.array_equal(Request(Sampling(), 2**bit).noise(4), Request(Sampling(), 0).noise(4))


def test_completion_reports_finish_reason() -> None:
    request = Request(Sampling(stop_token_ids=(4,)), 0, [3, 4], [-0.5, -1.0], [0, 1])
    assert request.completion().finish_reason == "stop"
    assert Request(Sampling(), 0, [3, 4], [-0.5, -1.0], [0, 1]).completion().finish_reason == "length"
    request.tokens.append(9)  # another thread is about to add the rest
    aborted = request.completion("aborted")
    assert (aborted.tokens, aborted.versions, aborted.finish_reason) == ((3, 4), (0, 1), "aborted")


def future(name: str, has_new_token: bool = True) -> Any:
    return SimpleNamespace(
        state=SimpleNamespace(request_id=name), has_new_token=has_new_token, complete_blocks={"full_attention": 1}
    )


def test_sampler_assigns_rows_to_requests_with_a_new_token() -> None:
    sampler = RequestSampler(version=3)
    requests = {name: Request(Sampling(temperature=temperature), 1) for name, temperature in [("a", 0), ("c", 1.0)]}
    for name, request in requests.items():
        sampler.add(name, request)
    x = logits(4)
    scores = x.clone()  # rows: c, gone, a, and one that means nothing
    sampler.prepare_tensor_args([future("c"), future("b", False), future("gone"), future("a")], torch.empty(0))
    top = sampler(torch.empty(0), scores, torch.empty(0)).argmax(-1)
    assert requests["a"].tokens == [int(x[2].argmax())] == [int(top[2])]
    assert requests["c"].tokens == [int(top[0])]
    for name, row in [("a", 2), ("c", 0)]:
        wanted = float(x[row].log_softmax(-1)[requests[name].tokens[0]])
        assert math.isclose(requests[name].logprobs[0], wanted, abs_tol=1e-6)
        assert requests[name].versions == [3]
    assert torch.equal(scores[[1, 3]], x[[1, 3]])


def test_outdated_requests_do_not_share_cache_blocks() -> None:
    sampler = RequestSampler(version=0)
    sampler.keep_private(["old"])
    batch = [future("old", False), future("new")]
    sampler.prepare_tensor_args(batch, torch.empty(0))
    assert [request.complete_blocks for request in batch] == [{}, {"full_attention": 1}]


def test_non_finite_logits_fail_their_request_and_share_no_blocks() -> None:
    failed: list[tuple[str, str]] = []
    sampler = RequestSampler(version=7, failed=lambda name, text: failed.append((name, text)))
    good, bad = Request(Sampling(), 0), Request(Sampling(), 0)
    sampler.add("good", good)
    sampler.add("bad", bad)
    batch = [future("good"), future("bad"), future("begins", False)]
    sampler.prepare_tensor_args(batch, torch.empty(0))
    sampler(torch.empty(0), torch.stack([torch.zeros(5), torch.full((5,), torch.nan)]), torch.empty(0))
    assert [name for name, _ in failed] == ["bad"]
    assert "the logits of version 7 are not finite" in failed[0][1]
    assert (len(good.tokens), len(bad.tokens)) == (1, 0)
    # Nothing of this forward is shared, nor of later ones with these requests.
    later = [future("good"), future("begins"), future("new")]
    sampler.prepare_tensor_args(later, torch.empty(0))
    assert [each.complete_blocks for each in (*batch, *later)] == [{}] * 5 + [{"full_attention": 1}]
