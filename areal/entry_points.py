"""Engines and backends by name: those of this package from a table, those of other packages from their entry points.

The table makes this package's own names independent of installed metadata, which a copy on ``PYTHONPATH``, a vendored copy, a zip
archive and Ray's ``py_modules`` do not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

OWN_DISTRIBUTION = "areal"

ENGINE_GROUP = "areal.engines"
"""Entry point group of engine classes."""

TRAINING_GROUP = "areal.tinker_backends"
"""Entry point group of functions that are a :class:`~areal.tinker.backends.backend.TrainingFactory`."""

SAMPLING_GROUP = "areal.tinker_samplers"
"""Entry point group of functions that are a :class:`~areal.tinker.backends.backend.SamplingFactory`."""

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    ENGINE_GROUP: {
        "fsdp": "areal.engine.fsdp.engine:FSDPEngine",
        "megatron": "areal.engine.megatron.engine:MegatronEngine",
        "jax": "areal.engine.jax.engine:JAXEngine",
    },
    TRAINING_GROUP: {
        "fsdp": "areal.tinker.backends.training.engine_backend:create",
        "megatron": "areal.tinker.backends.training.engine_backend:create",
        "jax": "areal.tinker.backends.training.engine_backend:create",
    },
    SAMPLING_GROUP: {
        "local": "areal.tinker.backends.sampling.local_sampler:create",
        "vllm": "areal.tinker.backends.sampling.vllm.http_sampler:create",
    },
}
"""Group -> name -> ``module:attribute``. pyproject.toml declares the same, for programs that read metadata."""


def registered_names(group: str) -> list[str]:
    """Return the names of a group, sorted. Nothing is imported."""
    return sorted({*BUILT_IN.get(group, {}), *_declared(group)})


def registered_entry(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of that name, or ``None`` if there is none.

    Raises:
        ValueError: packages declare different targets for the name.
    """
    own = BUILT_IN.get(group, {}).get(name)
    # Target -> package. The target of this package comes first.
    targets = {own: OWN_DISTRIBUTION} if own is not None else {}
    for value, package in _declared(group).get(name, ()):
        targets.setdefault(value, package)
    if len(targets) > 1:
        sources = ", ".join(f"{value!r} of {package}" for value, package in targets.items())
        raise ValueError(
            f"the name {name!r} of the entry point group '{group}' has different targets: {sources}; a name has one target: "
            f"uninstall or rename all but one{' (areal keeps its own)' if own is not None else ''}"
        )
    return EntryPoint(name, next(iter(targets)), group) if targets else None


def _declared(group: str) -> dict[str, list[tuple[str, str]]]:
    """Return targets and packages by name, from the metadata of other packages."""
    declared: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for point in entry_points(group=group):
        package = point.dist.name if point.dist is not None else "an unknown package"
        # Metadata of this package may belong to an older copy of it: the table describes the code that runs.
        if package.lower() != OWN_DISTRIBUTION:
            declared[point.name].append((point.value, package))
    return declared
