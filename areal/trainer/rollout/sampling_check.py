"""Comparison of the parameters with which answers were sampled with those that the trainer applies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from areal.api import TrainEngineConfig

logger = logging.getLogger(__name__)

SamplingItems = tuple[tuple[str, float], ...]
"""Sampling parameters as names and values, in the order of :meth:`~areal.inference.protocol.Sampling.distribution`."""

_ALL_TOKENS: Mapping[str, float] = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
"""Value of each parameter that excludes no token."""


class SamplingCheck:
    """Raises or warns if the trainer's log-probs are not of the distribution from which answers were sampled.

    A sample carries its temperature, which the engine applies. Excluded tokens (``top_p``, ``top_k``) are not known to the trainer: its
    log-probs are of the distribution over all tokens.

    Args:
        config: configuration of the policy.
        recompute_logprobs: the trainer computes ``old_logprobs``; otherwise they are the rollout's.
        warns: True on one rank, which logs the warnings.

    Attributes:
        excluded: tokens were excluded from the sampling of an answer on this rank.
    """

    def __init__(self, config: TrainEngineConfig, *, recompute_logprobs: bool, warns: bool) -> None:
        # A default is no statement about the temperature of the rollout.
        self._explicit = config.temperature if "temperature" in config.model_fields_set else None
        self._recompute_logprobs = recompute_logprobs
        self._warns = warns
        self._warned: set[tuple[str, float]] = set()
        self.excluded = False

    def __call__(self, samplings: Iterable[SamplingItems]) -> None:
        """Check the parameters of a batch. They are the same on all ranks, so all raise or none.

        Raises:
            ValueError: ``TrainEngineConfig.temperature`` is set to another temperature, or truncated log-probs would serve as
                ``old_logprobs``.
        """
        for name, value in sorted({item for sampling in samplings for item in sampling}):
            if name == "temperature":
                self._check_temperature(value)
            elif value != _ALL_TOKENS.get(name, value):
                self._check_excluded(name, value)

    def _check_temperature(self, temperature: float) -> None:
        """Compare with the engine's temperature, if it was set, and warn of greedy answers."""
        # Log-probs of greedy answers are those at temperature 1.
        applied = temperature or 1.0
        if self._explicit is not None and self._explicit != applied:
            raise ValueError(
                f"TrainEngineConfig.temperature = {self._explicit}, and answers were sampled at temperature {temperature}: leave it out, "
                "because each sample carries its temperature, or set it to that of the rollout"
            )
        if temperature == 0:
            self._warn_once(
                "temperature",
                0.0,
                "answers are greedy, and the trainer's log-probs are those at temperature 1: no other answer is explored",
            )

    def _check_excluded(self, name: str, value: float) -> None:
        """Refuse log-probs of a truncated distribution as ``old_logprobs``, and warn of them otherwise."""
        if not self._recompute_logprobs:
            raise ValueError(
                f"Sampling.{name} = {value:g} with Updates.recompute_logprobs = False: the rollout's log-probs are those of the remaining "
                f"tokens, the trainer's those of all tokens. Set recompute_logprobs to True, or {name} to {_ALL_TOKENS[name]:g}"
            )
        self.excluded = True
        self._warn_once(
            name,
            value,
            "tokens were excluded from sampling, and the trainer's log-probs are of the distribution over all tokens. Ratios of trainer to "
            f"rollout, rollout/logprob_error and a mismatch correction contain the difference; {name} = {_ALL_TOKENS[name]:g} avoids it",
        )

    def _warn_once(self, name: str, value: float, why: str) -> None:
        """Log a warning, unless there was one about this value."""
        if self._warns and (name, value) not in self._warned:
            logger.warning("Sampling.%s = %g: %s", name, value, why)
        self._warned.add((name, value))
