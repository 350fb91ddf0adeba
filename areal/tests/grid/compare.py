"""Comparison of an engine's results with the reference. Each function returns the largest error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from areal.api import NamedTensor, StepOutput
from areal.tests.grid.reference import ReferenceStep


def assert_tensors(actual: Iterable[NamedTensor], expected: Mapping[str, Tensor], tolerance: float) -> float:
    """Compare streamed tensors by name.

    The error of a tensor is its largest difference, relative to its largest entry or to a millionth of the largest entry of all.

    Returns:
        The largest error.
    """
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    errors: dict[str, float] = {}
    for name, tensor in actual:
        assert name in expected, f"{name} is not in the model's files, which have {sorted(expected)}"
        assert name not in errors, f"{name} came twice"
        want = expected[name]
        assert tensor.shape == want.shape, (
            f"{name} is {list(tensor.shape)}, and {list(want.shape)} in the model's files"
        )
        scale = max(want.abs().max().item(), 1e-6 * largest)
        errors[name] = (tensor.detach().cpu().double() - want).abs().max().item() / scale
    assert errors.keys() == expected.keys(), f"missing: {sorted(expected.keys() - errors.keys())}"
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"errors above {tolerance:.0e} in {len(wrong)} of {len(errors)} tensors: {wrong}"
    return max(errors.values())


def assert_rows(
    actual: Sequence[Tensor], everyones: Sequence[Tensor], indices: Sequence[int], tolerance: float
) -> float:
    """Compare the outputs of this rank's sequences.

    Args:
        everyones: reference outputs of the global batch; errors are relative to their largest entry.
        indices: indices of this rank's sequences.

    Returns:
        The largest error.
    """
    expected = [everyones[i] for i in indices]
    assert [list(row.shape) for row in actual] == [list(row.shape) for row in expected]
    assert not any(row.requires_grad for row in actual)
    scale = max(row.abs().max().item() for row in everyones)
    errors = [
        (row.cpu().double() - want).abs().max().item() / scale for row, want in zip(actual, expected, strict=True)
    ]
    # A rank may be without sequences.
    worst = max(errors, default=0.0)
    assert worst <= tolerance, f"errors by sequence: {[f'{error:.1e}' for error in errors]}"
    return worst


def assert_step(actual: StepOutput, expected: ReferenceStep, tolerance: float) -> float:
    """Compare loss, terms, weights and metrics. Returns the largest error."""
    names = (
        {"weight": "loss"}
        if list(expected.weights) == ["loss"]
        else {f"weight/{name}": name for name in expected.weights}
    )
    pairs = {"loss": (actual.loss, expected.loss)}
    assert actual.terms.keys() == expected.terms.keys()
    pairs |= {f"terms[{name}]": (actual.terms[name], term) for name, term in expected.terms.items()}
    metrics = {**expected.metrics, **{name: expected.weights[term] for name, term in names.items()}}
    assert metrics.keys() <= actual.metrics.keys(), f"metrics are {sorted(actual.metrics)}, not {sorted(metrics)}"
    pairs |= {f"metrics[{name}]": (actual.metrics[name], metric) for name, metric in metrics.items()}
    scale = max(1.0, *(abs(term) for term in expected.terms.values()))
    errors = {name: abs(a - b) / max(scale, abs(b)) for name, (a, b) in pairs.items()}
    wrong = {name: pairs[name] for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"(actual, expected) differ by more than {tolerance:.0e}: {wrong}"
    return max(errors.values())


def assert_number(actual: float | None, expected: float, tolerance: float) -> float:
    """Compare a positive number. Returns its relative error."""
    assert actual is not None
    error = abs(actual - expected) / abs(expected)
    assert error <= tolerance, f"{actual} is not {expected}: off by {error:.1e}"
    return error
