"""Batches that are refused, with words of the error."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 50


IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])


MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


GOOD = {"input_ids": IDS, "attention_mask": MASK}


ONE = {"input_ids": torch.tensor([1, 2, 3])}


TWO = {"input_ids": torch.tensor([4, 5])}


BAD_BATCHES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("not a batch", torch.ones(2, 3), {}, "the batch is a Tensor: pass a dict"),
    ("list of tensors", [torch.ones(3)], {}, "the batch is a list with a Tensor"),
    ("list of texts", ["2 + 2"], {}, "the batch is a list with a str: pass"),
    (
        "images",
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "pixel_values": torch.ones(2, 3)},
        {},
        "key 'pixel_values'.*text alone",
    ),
    (
        "sound",
        [{"input_ids": torch.ones(3, dtype=torch.int64), "input_features": torch.ones(2)}],
        {},
        "key 'input_features'",
    ),
    ("text", "", {}, "the batch is a str"),
    ("no columns", {"input_ids": IDS[:, :0]}, {}, r"input_ids is \[2, 0\]: a sequence has at least 1 token"),
    ("rows of another key only", {"input_ids": IDS[:0], "reward": torch.ones(2)}, {}, r"'reward' is \[2\]"),
    ("no ids", {"attention_mask": MASK}, {}, r"no 'input_ids', only \['attention_mask'\]"),
    ("no ids in a sample", [{"x": IDS[0]}], {}, "sample 0 has no 'input_ids'"),
    ("ids not a tensor", {"input_ids": [[1, 2]]}, {}, "input_ids is a list: pass an int64 tensor"),
    ("ids of one dim", {"input_ids": IDS[0]}, {}, r"input_ids is \[3\], expected \[B, S\]"),
    ("ids of two dims in a list", [{"input_ids": IDS}], {}, r"input_ids of sample 0 is \[2, 3\], expected \[S_i\]"),
    ("float ids", {"input_ids": IDS.float()}, {}, r"input_ids is torch.float32: .*\.long\(\)"),
    ("empty sample", [ONE, {"input_ids": IDS[0, :0]}], {}, "input_ids of sample 1 is empty"),
    ("empty row", {**GOOD, "attention_mask": MASK * torch.tensor([[1], [0]])}, {}, r"attention_mask\[1\] is all 0"),
    ("left padding", {**GOOD, "attention_mask": MASK.flip(1)}, {}, "is left-padded.*from_left_padded"),
    ("a hole", {**GOOD, "attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, {}, "has a hole.*from_left_padded"),
    ("mask of segments", {**GOOD, "attention_mask": MASK * 2}, {}, r"attention_mask\[0\] holds 2"),
    ("mask shape", {**GOOD, "attention_mask": MASK[:, :2]}, {}, r"attention_mask is \[2, 2\] but input_ids \[2, 3\]"),
    ("mask in a list", [{**ONE, "attention_mask": torch.tensor([1, 1, 0])}], {}, "samples of a list are unpadded"),
    ("labels", {**GOOD, "labels": IDS}, {}, "'labels' is not allowed.*from_hf_labels"),
    ("labels in a list", [{**ONE, "labels": IDS[0]}], {}, "from_hf_labels"),
    ("reserved name", {**GOOD, "cu_seqlens": IDS}, {}, "'cu_seqlens' is not allowed"),
    ("name not a string", {**GOOD, 3: IDS}, {}, "the key 3, a int: keys are strings"),
    ("unknown shape", {**GOOD, "x": torch.rand(5)}, {}, r"'x' is \[5\]: neither per-token"),
    ("scalar", {**GOOD, "beta": torch.tensor(0.1)}, {}, r"'beta' is \[\]: neither .*'meta'"),
    ("shifted key", {**GOOD, "logp": torch.rand(2, 2)}, {}, "'logp' is ambiguous.*per_sequence"),
    ("shifted key in a list", [{**ONE, "logp": torch.rand(2)}], {}, "'logp' is ambiguous.*per_sequence"),
    ("unknown in a list", [{**ONE, "x": torch.rand(5)}, {**TWO, "x": torch.rand(4)}], {}, "'x' is .*neither per-token"),
    ("dtypes differ", [{**ONE, "x": torch.tensor(1)}, {**TWO, "x": torch.tensor(1.0)}], {}, "give it one dtype"),
    ("keys differ", [{**ONE, "x": torch.rand(3)}, TWO], {}, r"samples 0 and 1 differ in their keys \['x'\]"),
    ("per-sequence shape", {**GOOD, "x": torch.rand(3)}, {"per_sequence": ("x",)}, r"'x' is \[3\]"),
    ("per-sequence ids", GOOD, {"per_sequence": ("input_ids",)}, r"per_sequence names \['input_ids'\]"),
    ("loss mask shape", {**GOOD, "loss_mask": torch.ones(2)}, {}, r"'loss_mask' is \[2\]: it is per-token"),
    ("loss mask in a list", [{**ONE, "loss_mask": torch.ones(2)}], {}, r"'loss_mask' of sample 0 is \[2\]"),
    ("a string", {**GOOD, "name": "x"}, {}, "'name' is a str, not a tensor.*'meta'"),
    ("a list", {**GOOD, "image": [IDS, IDS]}, {}, "'image' is a list, not a tensor.*payloads"),
    ("a number in a list", [{**ONE, "reward": 0.5}], {}, "'reward' of sample 0 is a float"),
    ("short payload", {**GOOD, "image": [IDS]}, {"payloads": ("image",)}, "'image' is not a list of 2 tensors of 1"),
    ("payload type", {**GOOD, "image": [IDS, 1]}, {"payloads": ("image",)}, r"'image\[1\]' is a int"),
    ("meta not a dict", {**GOOD, "meta": 3}, {}, "'meta' is a int: make it a dict"),
    ("two metas", [{**ONE, "meta": {"a": 1}}, {**TWO, "meta": {"a": 2}}], {}, "'meta' of sample 1 is not that"),
    ("devices", {**GOOD, "x": torch.rand(2, device="meta")}, {}, "'x' is on meta but input_ids on cpu"),
    (
        "id too large",
        {"input_ids": IDS * 10},
        {},
        "input_ids of sample 1 at position 1 is 50, outside the vocabulary of 50",
    ),
    ("id negative", [ONE, {"input_ids": torch.tensor([3, -1])}], {}, "input_ids of sample 1 at position 1 is -1"),
    ("target too large", {**GOOD, "target_ids": IDS + 48}, {}, "target_ids of sample 0 at position 1 is 50"),
    ("target negative", {**GOOD, "target_ids": IDS - 2}, {}, "target_ids of sample 0 at position 0 is -1.*-100 marks"),
    ("target of k", {**GOOD, "target_ids": torch.stack([IDS, IDS + 46], -1)}, {}, "sample 1 at position 0 is 50"),
    ("target dtype", {**GOOD, "target_ids": IDS.float()}, {}, "target_ids is torch.float32"),
    ("target dims", {**GOOD, "target_ids": IDS[..., None, None]}, {}, r"target_ids has \[1, 1\] targets"),
    ("output mask dims", {**GOOD, "output_mask": IDS[..., None]}, {}, r"output_mask has \[1\] values"),
    ("temperature", {**GOOD, "temperature": torch.tensor([1.0, 0.0])}, {}, "'temperature' holds a value"),
    ("groups", GOOD, {"granularity": 3}, "granularity = 3 does not divide the batch of 2"),
    (
        "overlong",
        GOOD,
        {"max_tokens_per_mb": 2},
        "sample 0 has 3 tokens, above .*max_tokens_per_mb = 2: .*overlong='alone'",
    ),
    ("overlong pair", GOOD, {"max_tokens_per_mb": 4, "granularity": 2}, "samples 0 to 1 .granularity 2. have 5 tokens"),
]
