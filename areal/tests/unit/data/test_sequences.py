"""Batch builders: per-token values are aligned with the position that predicts the token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.api import MicroBatchSpec
from areal.utils.data import (
    Segment,
    from_hf_labels,
    from_left_padded,
    from_prompt_response,
    from_segments,
    plan_batch,
    segment_mean,
    segment_sum,
    to_responses,
    unpad,
)


def packed(batch: Any) -> Any:
    plan = plan_batch(batch, MicroBatchSpec())
    return plan.build(n_mbs=1, device=torch.device("cpu"))[0].data


def rows(lengths: list[int], width: int, *, left: bool, start: int) -> tuple[Tensor, Tensor]:
    """Return token ids that encode row and position, and their mask; padding contains random ids."""
    ids = torch.full((len(lengths), width), -3)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for i, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        ids[i, where] = torch.arange(n) + start + 100 * i
        mask[i, where] = 1
    return ids, mask


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 2),
)
def test_prompt_response_round_trip_aligns_values(sizes: list[tuple[int, int]], left: bool, extra: int) -> None:
    prompts, responses = [p for p, _ in sizes], [r for _, r in sizes]
    prompt_ids, prompt_mask = rows(prompts, max(prompts) + extra, left=left, start=1)
    response_ids, response_mask = rows(responses, max(responses) + extra, left=False, start=50)
    about = response_ids.float()  # a value identifies the token it belongs to
    values = {"logprobs": about, "pairs": torch.stack([about, -about], -1)}
    batch = from_prompt_response(prompt_ids, prompt_mask, response_ids, response_mask, values=values)
    assert batch["input_ids"].shape == (len(sizes), max(p + r for p, r in sizes))
    data = packed(batch)
    trained = data["loss_mask"].bool()
    assert data["loss_mask"].sum() == sum(responses)
    assert torch.equal(data["logprobs"][trained], data["target_ids"][trained].float())
    assert torch.equal(data["pairs"][trained][:, 1], -data["target_ids"][trained].float())
    assert not data["logprobs"][~trained].any()
    for i, row in enumerate(unpad(batch["input_ids"], batch["attention_mask"])):
        expected = [*range(1 + 100 * i, 1 + 100 * i + prompts[i]), *range(50 + 100 * i, 50 + 100 * i + responses[i])]
        assert row.tolist() == expected
    back = about * response_mask
    assert torch.equal(to_responses(batch["logprobs"], prompt_mask, response_mask), back)
    assert torch.equal(
        to_responses(unpad(batch["pairs"], batch["attention_mask"]), prompt_mask, response_mask)[..., 1], -back
    )


def test_partial_response_mask_and_nan_in_padding() -> None:
    prompt_ids, prompt_mask = rows([2, 1], 2, left=True, start=1)
    response_ids, response_mask = rows([3, 1], 3, left=False, start=50)
    weights = torch.tensor([[1.0, 0.0, 0.5], [1.0, torch.nan, torch.nan]])
    batch = from_prompt_response(prompt_ids, prompt_mask, response_ids, response_mask, loss_mask=weights)
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0.5, 0], [1, 0, 0, 0, 0]]
    assert batch["input_ids"].tolist() == [[1, 2, 50, 51, 52], [101, 150, 0, 0, 0]]


def test_invalid_prompt_response_raises() -> None:
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"prompt_ids is \[2, 3\] and prompt_mask \[2, 2\]"):
        from_prompt_response(ids, mask[:, :2], ids, mask)
    with pytest.raises(ValueError, match="2 prompts and 1 responses: repeat"):
        from_prompt_response(ids, mask, ids[:1], mask[:1])
    with pytest.raises(ValueError, match="there are no prompts"):
        from_prompt_response(ids[:0], mask[:0], ids[:0], mask[:0])
    with pytest.raises(ValueError, match=r"prompt 1 has no tokens.*BOS"):
        from_prompt_response(ids, mask * torch.tensor([[1.0], [0.0]]), ids, mask)
    with pytest.raises(ValueError, match=r"loss_mask\. .*has a hole"):
        from_prompt_response(ids, mask, ids, mask * torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match=r"'adv' is \[2, 4\]"):
        from_prompt_response(ids, mask, ids, mask, values={"adv": torch.ones(2, 4)})
    with pytest.raises(ValueError, match=r"\['input_ids'\]"):
        from_prompt_response(ids, mask, ids, mask, values={"input_ids": ids})
    with pytest.raises(ValueError, match=r"outputs of \[2, 4\] do not hold"):
        to_responses(torch.ones(2, 4), mask, mask)


def test_from_segments_of_an_agent_trajectory() -> None:
    sample = from_segments(
        [
            Segment([1, 2], trainable=False),
            Segment([3, 4, 5], trainable=True, values={"logprobs": [-0.3, -0.4, -0.5]}),
            Segment(torch.tensor([6]), trainable=False, values={"advantages": torch.tensor([0.6])}),
            Segment([], trainable=True),
            Segment([7], trainable=True, values={"logprobs": [-0.7], "advantages": [0.7]}),
        ]
    )
    assert sample["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 1, 0, 1, 0]
    assert sample["logprobs"].tolist() == pytest.approx([0, -0.3, -0.4, -0.5, 0, -0.7, 0])
    assert sample["advantages"].tolist() == pytest.approx([0, 0, 0, 0, 0.6, 0.7, 0])
    data = packed([sample])
    trained = data["loss_mask"].bool()
    assert torch.allclose(data["logprobs"][trained], -data["target_ids"][trained] / 10)


def test_first_token_of_a_trajectory_has_no_prediction() -> None:
    sample = from_segments([Segment([1, 2], trainable=True, values={"logprobs": [-9.0, -0.2]})])
    assert sample["loss_mask"].tolist() == [1, 0]
    assert sample["logprobs"].tolist() == pytest.approx([-0.2, 0])


def test_invalid_segments_raise() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        from_segments([Segment([], trainable=True)])
    with pytest.raises(ValueError, match=r"'x' of segment 0 are \[1\]: expected \[2\]"):
        from_segments([Segment([1, 2], trainable=True, values={"x": [0.0]})])
    pair = Segment([1], trainable=True, values={"x": torch.ones(1, 2)})
    with pytest.raises(ValueError, match=r"'x' of segment 1 are \[1\]: expected \[1, 2\]"):
        from_segments([pair, Segment([2], trainable=True, values={"x": [0.0]})])
    with pytest.raises(ValueError, match="the name 'loss_mask'"):
        from_segments([Segment([1], trainable=True, values={"loss_mask": [0.0]})])


def test_hf_labels_are_shifted_and_ignored_labels_have_weight_0() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = torch.tensor([[-100, -100, 7, 8], [9, 10, 0, 0]])  # the padding of the second row is not -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "reward": torch.ones(2)}
    out = from_hf_labels(batch)
    assert out["target_ids"].tolist() == [[-100, 7, 8, -100], [10, -100, -100, -100]]
    assert out["loss_mask"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert out["reward"] is batch["reward"]
    assert "labels" not in out
    assert "labels" in batch
    assert packed(out)["loss_mask"].sum() == 3
    (first, second) = from_hf_labels(
        [{"input_ids": ids[0], "labels": labels[0]}, {"input_ids": ids[1, :2], "labels": labels[1, :2]}]
    )
    assert first["target_ids"].tolist() == [-100, 7, 8, -100]
    assert second["loss_mask"].tolist() == [1, 0]


def test_hf_labels_of_a_left_padded_batch() -> None:
    batch = {
        "input_ids": torch.tensor([[0, 0, 5, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
        "labels": torch.tensor([[0, 0, 5, 6]]),
    }
    a, b = from_left_padded(from_hf_labels(batch)), from_hf_labels(from_left_padded(batch))
    assert a["target_ids"].tolist() == b["target_ids"].tolist() == [[6, -100, -100, -100]]
    assert a["loss_mask"].tolist() == b["loss_mask"].tolist() == [[1, 0, 0, 0]]


def test_invalid_hf_labels_raise() -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs labels and input_ids"):
        from_hf_labels({"input_ids": ids})
    with pytest.raises(ValueError, match="of one shape"):
        from_hf_labels({"input_ids": ids, "labels": ids[:, :2]})
    with pytest.raises(ValueError, match=r"labels and also \['loss_mask'\]"):
        from_hf_labels({"input_ids": ids, "labels": ids, "loss_mask": ids})


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.booleans())
def test_segment_sum_and_mean(lengths: list[int], trailing: bool) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x = torch.rand(sum(lengths), *([3] if trailing else []), dtype=torch.float64)
    w = torch.randint(3, (sum(lengths),)).double()
    segments = list(zip(x.split(lengths), w.split(lengths), strict=True))
    zero = x.new_zeros(x.shape[1:])
    sums = torch.stack([p.sum(0) for p, _ in segments])
    means = torch.stack([p.mean(0) if len(p) else zero for p, _ in segments])
    weighted = torch.stack([torch.einsum("t...,t->...", p, q) / q.sum() if q.sum() else zero for p, q in segments])
    torch.testing.assert_close(segment_sum(x, cu), sums)
    torch.testing.assert_close(segment_mean(x, cu), means)
    torch.testing.assert_close(segment_mean(x, cu, w), weighted)


def test_segment_helpers_are_differentiable_and_sum_in_float32() -> None:
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 0.0, 1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, cu), (x,))
    assert torch.autograd.gradcheck(lambda v, u: segment_mean(v, cu, u), (x, w))
    many = torch.ones(4096, dtype=torch.bfloat16)
    assert segment_sum(many, torch.tensor([0, 4095, 4096])).tolist() == [4095, 1]
    assert segment_sum(many > 0, torch.tensor([0, 4096])).tolist() == [4096]
