"""Chunked output head compared with full logits, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.api import IGNORE_INDEX
from areal.tests.unit.logprobs.head_cases import (
    CHUNK,
    CHUNK_BYTES,
    H,
    K,
    T,
    V,
    compare,
    make,
    named,
    reference,
    relative,
    scalar,
    update_of,
)
from areal.utils.functional import HeadOutputs, head_outputs, logits

WANTED = [(None, False, None), (None, True, 4), (K, False, None), (K, True, 4), (None, True, None), (K, False, 1)]


@pytest.mark.parametrize(
    ("chunk_size", "keep_bytes"),
    # The last chunk is smaller and would fit where a full chunk does not.
    [(1, 0), (CHUNK, 0), (CHUNK, int(1.7 * CHUNK_BYTES)), (CHUNK, None), (T, 0), (64, None), (None, 0), (None, None)],
)
@pytest.mark.parametrize(("columns", "entropy", "topk"), WANTED)
def test_chunked_head_equals_full_logits_for_all_options(
    columns: int | None, entropy: bool, topk: int | None, chunk_size: int | None, keep_bytes: int | None
) -> None:
    hidden, weight, bias, targets, per_token = make(columns=columns)
    for softcap, scale, temperature, with_bias, asked in itertools.product(
        (None, 2.0), (1.0, 0.7), (1.0, 1.6, per_token), (False, True), (targets, None)
    ):
        if asked is None and not (entropy or topk):
            continue
        options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": temperature}
        options |= {"bias": bias if with_bias else None, "entropy": entropy, "topk": topk}
        got = head_outputs(hidden, weight, asked, chunk_size=chunk_size, keep_bytes=keep_bytes, **options)
        leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
        compare(leaves, named(got), reference(hidden, weight, asked, **options), 1e-12)


@pytest.mark.parametrize(("chunk_size", "keep_bytes"), [(CHUNK, 0), (CHUNK, int(1.7 * CHUNK_BYTES)), (None, None)])
@pytest.mark.parametrize(("columns", "entropy", "topk"), WANTED)
def test_update_equals_a_changed_weight(
    columns: int | None, entropy: bool, topk: int | None, chunk_size: int | None, keep_bytes: int | None
) -> None:
    hidden, weight, bias, targets, temperature = make(columns=columns)
    update = update_of()
    options: dict[str, Any] = {"softcap": 2.0, "logit_scale": 0.7, "temperature": temperature, "bias": bias}
    # Without gradients of the head's weight, as for a frozen model, and with them.
    for frozen in (True, False):
        w = weight.detach() if frozen else weight
        changed = w + update.scale * update.up @ update.down
        got = head_outputs(
            *(hidden, w, targets),
            **options,
            update=update,
            entropy=entropy,
            topk=topk,
            chunk_size=chunk_size,
            keep_bytes=keep_bytes,
        )
        leaves = [hidden, bias, update.down, update.up, *([] if frozen else [weight])]
        want = reference(hidden, changed, targets, **options, entropy=entropy, topk=topk)
        compare(leaves, named(got), want, 1e-12)
    want = {"logits": logits(hidden, weight + update.scale * update.up @ update.down, **options)}
    compare(
        [hidden, bias, update.down, update.up],
        {"logits": logits(hidden, weight, update=update, **options)},
        want,
        1e-12,
    )


@pytest.mark.parametrize("fp32", [False, True])
def test_update_in_low_precision(fp32: bool) -> None:
    """Factors are float32, as an optimizer keeps them, and so are their gradients. Zeros change no bit."""
    hidden, weight, _, targets, _ = make(torch.bfloat16)
    update = update_of(torch.float32)
    got = named(head_outputs(hidden, weight, targets, update=update, entropy=True, fp32=fp32, chunk_size=4))
    want = reference(hidden, weight.double() + update.scale * (update.up @ update.down).double(), targets, entropy=True)
    compare([hidden, update.down, update.up], got, want, 5e-2)
    zero = update._replace(up=torch.zeros_like(update.up))
    plain = named(head_outputs(hidden, weight, targets, entropy=True, fp32=fp32))
    assert all(
        torch.equal(x, plain[name])
        for name, x in named(head_outputs(hidden, weight, targets, update=zero, entropy=True, fp32=fp32)).items()
    )
    for wrong in (update._replace(up=update.up[1:]), update._replace(down=update.down[:, 1:])):
        with pytest.raises(ValueError, match="update has down"):
            head_outputs(hidden, weight, targets, update=wrong)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_low_precision_inputs_give_float32_outputs_close_to_float64(dtype: torch.dtype, tol: float, fp32: bool) -> None:
    hidden, weight, bias, targets, temperature = make(dtype, columns=K)
    options: dict[str, Any] = {"bias": bias, "temperature": temperature, "softcap": 5.0, "entropy": True, "topk": 4}
    got = named(head_outputs(hidden, weight, targets, fp32=fp32, chunk_size=4, **options))
    assert {x.dtype for x in got.values()} == {torch.float32}
    want = reference(hidden, weight, targets, **options)
    compare([hidden, weight, bias], got, want, tol)
    if fp32:  # only gradients are rounded to the inputs' dtype
        assert all(relative(x, want[name]) <= 5e-6 for name, x in got.items())


def test_bf16_weight_gradient_does_not_lose_small_chunks() -> None:
    """Accumulated in bf16, 4,096 equal contributions would stop growing at a few hundred."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    out = head_outputs(hidden, weight, torch.zeros(4096, dtype=torch.int64), chunk_size=1)
    assert out.logprobs is not None
    out.logprobs.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[2048.0], [-2048.0]], dtype=torch.bfloat16))


def test_mixed_dtypes_are_multiplied_in_the_wider_dtype() -> None:
    hidden, weight, _, targets, _ = make(torch.float32)
    got = head_outputs(hidden.detach().bfloat16(), weight, targets).logprobs
    want = head_outputs(hidden.detach().bfloat16().float(), weight, targets).logprobs
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["logprobs", "columns", "entropy", "topk", "temperature", "softcap", "bias"])
def test_gradcheck(case: str) -> None:
    hidden, weight, bias, targets, temperature = make(tokens=6, columns=K if case == "columns" else None)
    options: dict[str, Any] = {
        "entropy": {"entropy": True},
        "topk": {"topk": 3},
        "temperature": {"temperature": temperature, "entropy": True},
        "softcap": {"softcap": 1.5, "logit_scale": 0.8, "entropy": True, "topk": 2},
        "bias": {"bias": bias, "entropy": True},
    }.get(case, {})
    asked = None if case in ("entropy", "topk") else targets

    def run(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            named(head_outputs(h, w, asked, chunk_size=4, **(options | ({"bias": b} if bias_in else {})))).values()
        )

    bias_in = "bias" in options
    assert torch.autograd.gradcheck(run, (hidden, weight, bias if bias_in else bias.detach()))


@pytest.mark.parametrize("columns", [None, K])
@pytest.mark.parametrize("entropy", [False, True])
def test_missing_targets_give_zero_logprob_and_no_gradient(columns: int | None, entropy: bool) -> None:
    hidden, weight, _, targets, temperature = make(torch.float32, columns=columns)
    targets = torch.full_like(targets, IGNORE_INDEX)
    out = head_outputs(hidden, weight, targets, temperature=temperature, entropy=entropy, chunk_size=4)
    assert out.logprobs is not None
    assert torch.equal(out.logprobs, torch.zeros(targets.shape))
    (out.logprobs * float("inf") if entropy else out.logprobs).nan_to_num().sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_partly_missing_targets_give_zero_with_any_outputs() -> None:
    hidden, weight, _, targets, _ = make()
    plain = head_outputs(hidden, weight, targets).logprobs
    beside = head_outputs(hidden, weight, targets, entropy=True, topk=2).logprobs
    assert plain is not None
    assert beside is not None
    torch.testing.assert_close(plain, beside, rtol=1e-14, atol=1e-14)
    for x in (plain, beside):
        assert torch.equal(x == 0, targets == IGNORE_INDEX)
        (grad,) = torch.autograd.grad(x.sum(), hidden)
        assert torch.equal(grad.abs().sum(1) == 0, targets == IGNORE_INDEX)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize(("columns", "entropy", "topk"), WANTED)
def test_few_tokens(tokens: int, columns: int | None, entropy: bool, topk: int | None) -> None:
    hidden, weight, bias, targets, temperature = make(tokens=tokens, columns=columns)
    options: dict[str, Any] = {"bias": bias, "temperature": temperature, "entropy": entropy, "topk": topk}
    got = named(head_outputs(hidden, weight, targets, **options))
    compare([hidden, weight, bias], got, reference(hidden, weight, targets, **options), 1e-12)


def test_topk_ids_match_sorted_logprobs() -> None:
    hidden, weight, _, targets, _ = make()
    out = head_outputs(hidden, weight, targets, topk=5, chunk_size=4)
    assert out.topk is not None
    logp = torch.log_softmax(hidden @ weight.t(), -1)
    assert torch.equal(out.topk.ids, logp.topk(5, -1).indices)
    assert bool((out.topk.logprobs.diff(dim=1) <= 0).all())
    assert not out.topk.ids.requires_grad


def test_a_repeated_target_counts_each_time() -> None:
    hidden, weight, _, targets, _ = make()
    twice = targets.clamp(min=0)[:, None].expand(-1, 2).contiguous()
    compare([hidden, weight], named(head_outputs(hidden, weight, twice)), reference(hidden, weight, twice), 1e-12)


def test_logits_far_from_zero_stay_finite() -> None:
    hidden, weight, _, targets, _ = make()
    options: dict[str, Any] = {"logit_scale": 500.0, "entropy": True, "topk": 2}
    got = named(head_outputs(hidden, weight, targets, **options))
    compare([hidden, weight], got, reference(hidden, weight, targets, **options), 1e-10)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_inputs_without_requires_grad_get_no_gradient(frozen: str) -> None:
    hidden, weight, _, targets, _ = make()
    want = torch.autograd.grad(scalar(reference(hidden, weight, targets, entropy=True)), [hidden, weight])
    leaf, expected = (weight, want[1]) if frozen == "hidden" else (hidden, want[0])
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    scalar(named(head_outputs(hidden, weight, targets, entropy=True))).backward()
    assert relative(leaf.grad, expected) <= 1e-12
    assert (hidden if frozen == "hidden" else weight).grad is None


def test_no_grad_gives_equal_outputs_without_graph() -> None:
    hidden, weight, _, targets, _ = make()
    want = named(head_outputs(hidden, weight, targets, entropy=True, topk=2))
    with torch.no_grad():
        got = named(head_outputs(hidden, weight, targets, entropy=True, topk=2))
    assert all(torch.equal(got[name], want[name]) and not got[name].requires_grad for name in want)


def test_autocast_does_not_change_outputs() -> None:
    hidden, weight, bias, targets, _ = make(torch.float32)
    want = head_outputs(hidden, weight, targets, bias=bias).logprobs, logits(hidden, weight, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        got = head_outputs(hidden, weight, targets, bias=bias).logprobs, logits(hidden, weight, bias=bias)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_activation_checkpointing_of_head_is_bitwise_equal() -> None:
    hidden, weight, _, targets, _ = make()

    def run(h: Tensor, w: Tensor) -> Tensor:
        return scalar(named(head_outputs(h.tanh(), w, targets, entropy=True, topk=2, chunk_size=4)))

    want = torch.autograd.grad(run(hidden, weight), [hidden, weight])
    got = torch.autograd.grad(checkpoint(run, hidden, weight, use_reentrant=False), [hidden, weight])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_double_backward_raises() -> None:
    hidden, weight, _, targets, _ = make()
    out = head_outputs(hidden, weight, targets).logprobs
    assert out is not None
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_logits_match_logprobs(softcap: float | None, per_token: bool) -> None:
    hidden, weight, bias, targets, temperatures = make()
    options: dict[str, Any] = {"bias": bias, "softcap": softcap, "logit_scale": 0.6}
    options["temperature"] = temperatures if per_token else 1.4
    z = logits(hidden, weight, **options)
    assert z.shape == (T, V)
    logp = torch.log_softmax(z, -1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1) * (targets != IGNORE_INDEX)
    compare([hidden, weight, bias], {"logprobs": logp}, reference(hidden, weight, targets, **options), 1e-12)


def test_logits_of_bf16_are_float32() -> None:
    hidden, weight, _, _, _ = make(torch.bfloat16)
    assert logits(hidden, weight).dtype == torch.float32
    assert relative(logits(hidden, weight, fp32=True), hidden.double() @ weight.double().t()) <= 1e-6


BAD: list[tuple[str, dict[str, Any]]] = [
    ("keep_bytes = -1", {"keep_bytes": -1}),
    ("temperature = 0", {"temperature": 0.0}),
    ("temperature = -1", {"temperature": -1}),
    (r"temperature \[3\]", {"temperature": torch.ones(3)}),
    ("softcap = 0", {"softcap": 0.0}),
    ("topk = 0", {"topk": 0}),
    (f"topk = {V + 1}", {"topk": V + 1}),
    ("chunk_size = 0", {"chunk_size": 0}),
    (r"bias \[4\]", {"bias": torch.zeros(4)}),
    ("torch.float32", {"targets": torch.zeros(T)}),
    ("one row per token", {"targets": torch.zeros(T + 1, dtype=torch.int64)}),
    (f"the id {V}, outside the vocabulary", {"targets": torch.full((T,), V)}),
    ("the id -1, outside the vocabulary", {"targets": torch.full((T,), -1)}),
    (r"flatten", {"hidden": torch.zeros(1, T, H)}),
    (r"no rows", {"weight": torch.zeros(0, H)}),
]


@pytest.mark.parametrize(("message", "change"), BAD)
def test_invalid_head_arguments_raise(message: str, change: dict[str, Any]) -> None:
    hidden, weight, _, targets, _ = make(torch.float32)
    arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        head_outputs(**arguments)


def test_no_requested_outputs_gives_none() -> None:
    hidden, weight, _, _, _ = make()
    assert head_outputs(hidden, weight, None) == HeadOutputs(None, None, None)
