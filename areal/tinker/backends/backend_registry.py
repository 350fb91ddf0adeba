"""Backends by name, from this package or any other that declares an entry point in one of these groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from areal.entry_points import SAMPLING_GROUP, TRAINING_GROUP, registered_entry, registered_names
from areal.tinker.backends.backend import (
    BorrowsParameters,
    LendsParameters,
    SamplingBackend,
    SamplingFactory,
    TrainingBackend,
    TrainingFactory,
)

logger = logging.getLogger(__name__)


def create_training_backend(model: str, backend: str, config: Mapping[str, Any]) -> TrainingBackend:
    """Start the backend whose name is the part of ``backend`` before the first colon.

    Args:
        model: directory or hub name of the base model.
        backend: name, with a layout if the backend has some, such as ``fsdp:d2``.
        config: settings of the backend.

    Raises:
        ValueError: no installed package has such a backend, a dependency of it is missing, or a setting is refused.
    """
    factory: TrainingFactory = _load(TRAINING_GROUP, "backend", backend.partition(":")[0])
    return factory(model, backend, config)


def create_sampling_backend(model: str, sampler: str, config: Mapping[str, Any]) -> SamplingBackend:
    """Start the sampler of this name. Arguments and errors are as for :func:`create_training_backend`."""
    factory: SamplingFactory = _load(SAMPLING_GROUP, "sampler", sampler)
    return factory(model, config)


def create_backends(
    model: str, backend: str, backend_config: Mapping[str, Any], sampler: str | None, sampler_config: Mapping[str, Any]
) -> tuple[TrainingBackend, SamplingBackend | None]:
    """Start a backend that trains and one that samples, which have the base model in memory once if they can.

    Args:
        model: directory or hub name of the base model.
        backend: name of the training backend with its layout.
        backend_config: settings of the training backend.
        sampler: name of the sampler; ``None`` for no sampler.
        sampler_config: settings of the sampler.

    Raises:
        ValueError: see :func:`create_training_backend`.
    """
    training = create_training_backend(model, backend, backend_config)
    sampling = None if sampler is None else create_sampling_backend(model, sampler, sampler_config)
    share_base_model(training, sampling)
    return training, sampling


def share_base_model(training: TrainingBackend, sampling: SamplingBackend | None) -> None:
    """Let a sampler read the base model of a training backend of the same process, so that it is in memory once."""
    if isinstance(training, LendsParameters) and isinstance(sampling, BorrowsParameters):
        nbytes = sampling.borrow(training.base_parameters())
        if nbytes:
            logger.info(
                "the sampler reads the base model of the training backend: %.0f MiB are in memory once", nbytes / 2**20
            )


def backend_names(group: str) -> list[str]:
    """Return the names of the installed backends of a group."""
    return registered_names(group)


def _load(group: str, option: str, name: str) -> Any:
    entry = registered_entry(group, name)
    if entry is None:
        raise ValueError(
            f"{option} = {name!r}: installed are {', '.join(backend_names(group))} (entry point group '{group}')"
        )
    try:
        return entry.load()
    except ImportError as error:
        raise ValueError(
            f"{option} = {name!r}: it needs what is not installed ({error}): install areal[tinker,rollout]"
        ) from error
