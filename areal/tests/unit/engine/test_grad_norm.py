"""The gradient norm does not depend on the size or the sharding of tensors."""

import pytest
import torch

from areal.engine.optimizer import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_is_exact_for_large_tensors(dtype: torch.dtype) -> None:
    """Float32 accumulation would be off by 0.01 %."""
    grad = torch.rand(2**23, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = grad.double().square().sum().item()
    full = sum_of_squares([grad], "cpu").item()
    cut = sum_of_squares([*grad.split(1000_003), grad[:0]], "cpu").item()
    assert full == pytest.approx(exact, rel=1e-12)
    assert cut == pytest.approx(exact, rel=1e-12)
