"""The norm of a gradient does not depend on how large its tensors are, or how they are cut."""

import pytest
import torch

from areal.engine.optimizer import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_many_elements_are_summed_exactly(dtype: torch.dtype) -> None:
    """Summed in float32, these would be off by a hundredth of a per cent."""
    grad = torch.rand(2**23, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = grad.double().square().sum().item()
    whole = sum_of_squares([grad], "cpu").item()
    cut = sum_of_squares([*grad.split(1000_003), grad[:0]], "cpu").item()
    assert whole == pytest.approx(exact, rel=1e-12)
    assert cut == pytest.approx(exact, rel=1e-12)
