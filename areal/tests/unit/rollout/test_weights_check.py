"""Log-probs of a rollout whose weights do not follow those of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from areal.trainer.rollout.weights_check import WeightsCheck

GROWING = (4e-7, 0.012, 0.029, 0.059)


def step_of_the_error(
    errors: Sequence[float], limit: float | None = 10.0, staleness: Sequence[float] = ()
) -> int | None:
    """Return the index of the batch that ends the run."""
    check = WeightsCheck(limit)
    for index, error in enumerate(errors):
        try:
            check({"rollout/logprob_error": error, "rollout/staleness": [*staleness, *[0.0] * len(errors)][index]})
        except RuntimeError:
            return index
    return None


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        (GROWING, 3),
        ((0.01, 0.02, 0.04, 0.08, 0.16), 4),  # 10 times the first
        ((0.01, 0.012, 0.009, 0.013, 0.016, 0.02), None),  # rounding of kernels
        ((0.001, 0.02, 0.001, 0.02, 0.03, 0.02), None),  # large, but not growing
        ((1e-7, 2e-7, 4e-7, 8e-7, 16e-7, 32e-7), None),  # rounding on a CPU
    ],
)
def test_error_that_grows_ends_the_run(errors: Sequence[float], ends: int | None) -> None:
    assert step_of_the_error(errors) == ends


def test_error_names_the_growth_and_the_way_out() -> None:
    check = WeightsCheck(10.0)
    for error in GROWING[:-1]:
        check({"rollout/logprob_error": error, "rollout/staleness": 0.0})
    with pytest.raises(
        RuntimeError, match=r"0\.059 has grown in 3 steps in a row, from 4e-07 in the first .* staleness 0.*sync="
    ):
        check({"rollout/logprob_error": GROWING[-1], "rollout/staleness": 0.0})


def test_another_model_is_noticed_in_the_first_batch() -> None:
    with pytest.raises(RuntimeError, match=r"logprob_error = 10.1 nats in the first batch.*started with the model"):
        WeightsCheck(10.0)({"rollout/logprob_error": 10.1, "rollout/staleness": 0.0})
    WeightsCheck(None)({"rollout/logprob_error": 10.1, "rollout/staleness": 0.0})
    # Log-probs of the remaining tokens, such as with top_k, differ from those of all tokens.
    WeightsCheck(10.0)({"rollout/logprob_error": 10.1, "rollout/staleness": 0.0}, lambda: True)


def test_error_of_old_weights_does_not_count() -> None:
    assert step_of_the_error(GROWING, staleness=[0.0, 1.0, 0.5, 1.0]) is None
    assert step_of_the_error(GROWING, limit=None) is None
    WeightsCheck(2.0)({"rollout/staleness": 0.0})  # nothing was recomputed


def test_resumed_run_keeps_the_error_of_its_first_batch() -> None:
    check = WeightsCheck(10.0)
    check({"rollout/logprob_error": 0.01, "rollout/staleness": 0.0})
    resumed = WeightsCheck(10.0)
    resumed.load_state_dict(check.state_dict())
    assert resumed.state_dict() == {"first_error": 0.01}
    resumed.load_state_dict({})
    assert resumed.state_dict() == {"first_error": None}
