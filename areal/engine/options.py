"""Options that an engine supports: every other option that differs from its default is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from pydantic import BaseModel

from areal.api.config import TrainEngineConfig
from areal.api.parallel import ParallelDims
from areal.api.sections.backend import BackendConfig
from areal.api.sections.optimizer import OptimizerConfig

TEMPLATE_OPTIONS = frozenset(
    {
        # The batch is checked and cut before the engine sees it. `mb_spec.share_prefixes` changes the inputs of the model.
        *("mb_spec.max_tokens_per_mb", "mb_spec.n_mbs", "mb_spec.granularity", "mb_spec.overlong"),
        *("mb_spec.samples_per_mb", "mb_spec.equal_batches"),
        *("mb_spec.per_sequence", "mb_spec.payloads"),
        # Limits of the exchanges between ranks.
        *("control_timeout", "collective_timeout", "heartbeat_timeout"),
        # Switches of the process, set before the model is built.
        *("deterministic", "seed"),
    }
)
"""Options that :class:`~areal.engine.base.BaseTrainEngine` honours for every engine."""

OPTIMIZER_OPTIONS = frozenset(f"optimizer.{name}" for name in OptimizerConfig.model_fields) - {"optimizer.muon"}
"""Options of the optimizers that every engine has."""

MODEL_OPTIONS = TEMPLATE_OPTIONS | {
    *("dtype", "master_dtype", "grad_reduce_dtype"),
    *("init_from_scratch", "value_head", "temperature", "fp32_head", "kept_logits_mb", "mb_spec", "moe", "lora"),
    *(*OPTIMIZER_OPTIONS, "optimizer.muon", "activation_checkpointing", "offload_dir", "memory_limit_mb"),
}
"""Options that every engine of torch modules honours."""

_ONCE_PER_CALL = ("grad_sync", "call")
"""An engine without the option ``grad_sync`` reduces gradients once, so that this value is not refused."""

_EVERY_ENGINE = frozenset({"path", "backend"})
"""Fields without which there is no engine: letters of the layout are checked apart."""


def engine_config(engine: type, config: TrainEngineConfig) -> TrainEngineConfig:
    """Check a configuration against the declarations of an engine class, and validate the engine's section.

    Args:
        engine: class of the engine. ``supported_options`` and ``config_class`` are its declarations; see
            :class:`~areal.engine.base.BaseTrainEngine`.
        config: configuration as the user wrote it.

    Returns:
        The configuration. Its section of this engine is an instance of ``config_class``.

    Raises:
        ValueError: an option that differs from its default is not supported, or belongs to another engine; or the section is not valid.
    """
    config_class: type[BackendConfig] = getattr(engine, "config_class", BackendConfig)
    if not issubclass(config_class, BackendConfig):
        raise TypeError(
            f"{engine.__name__}.config_class = {config_class.__name__}: derive it from areal.api.BackendConfig, which refuses unknown fields"
        )
    own = _section_name(config_class, config)
    section = _own_section(config_class, own, config)
    if section is not getattr(config, own, None):
        config = config.model_copy(update={own: section})
    section.check_combination(config)

    # Sections of other engines may be there, so that one file can serve several engines, but only with their defaults.
    foreign = _section_names(config) - {own}
    ignored = [option for name in sorted(foreign) for option in _changed(name, getattr(config, name))]
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)} with backend = '{config.dims}': the section of this engine is {own!r}, and options of another section would "
            "have no effect; leave them out, or choose the engine that they belong to"
        )

    # Options outside of sections.
    supported = getattr(engine, "supported_options", frozenset()) | _EVERY_ENGINE | foreign | {own}
    unsupported = list(_unsupported(config, supported))
    if unsupported:
        raise ValueError(
            f"{', '.join(unsupported)} with backend = '{config.dims}': the {config.dims.backend} engine does not support this; "
            "leave it out, or choose another engine"
        )
    _check_muon(config, supported)
    return config


def _check_muon(config: TrainEngineConfig, supported: Set[str]) -> None:
    """Raise if Muon is configured, and the engine does not support its options, or adapters are trained."""
    if config.optimizer is None or config.optimizer.type != "muon":
        return
    if "optimizer.muon" not in supported:
        raise ValueError(
            f"optimizer.type = 'muon' with backend = '{config.dims}': the {config.dims.backend} engine has adamw and sgd; choose one of them, "
            "or another engine"
        )
    if config.lora is not None:
        raise ValueError(
            "optimizer.type = 'muon' with lora: updates of the factors of an adapter would be orthogonal, not those of the weights; choose "
            "'adamw'"
        )


def process_dims(engine: type, config: TrainEngineConfig) -> ParallelDims:
    """Return the layout of an engine's processes: that of the configuration, unless a process is several ranks of it.

    Args:
        engine: class of the engine. ``ranks_per_process`` is its declaration; see :class:`~areal.engine.state.EngineState`.
        config: configuration that :func:`engine_config` has returned.

    Raises:
        ValueError: processes of so many ranks do not divide the layout.
    """
    ranks = getattr(engine, "ranks_per_process", None)
    return config.dims if ranks is None else config.dims.of_processes(ranks(config))


def _section_name(config_class: type[BackendConfig], config: TrainEngineConfig) -> str:
    """Return the field with this type, so that a subclass of an engine reads the section of its base class; else the engine's name."""
    for name, field in TrainEngineConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BackendConfig) and issubclass(config_class, kind):
            return name
    return config.dims.backend


def _section_names(config: TrainEngineConfig) -> set[str]:
    fields = {name for name in TrainEngineConfig.model_fields if isinstance(getattr(config, name), BackendConfig)}
    return fields | set(config.model_extra or {})


def _own_section(config_class: type[BackendConfig], name: str, config: TrainEngineConfig) -> BackendConfig:
    section = getattr(config, name, {})
    if isinstance(section, config_class):
        return section
    values = section.model_dump(exclude_unset=True) if isinstance(section, BaseModel) else section
    try:
        return config_class.model_validate(values)
    except ValueError as error:
        raise ValueError(f"{name} = {section!r}, the section of backend = '{config.dims}': {error}") from error


def _changed(name: str, section: Any) -> Iterator[str]:
    """Yield the options of another engine's section that differ from their defaults, with their values. The defaults of a mapping are
    unknown here, so that all its options count.
    """
    if isinstance(section, Mapping):
        yield from (f"{name}.{option} = {value!r}" for option, value in section.items())
    else:
        yield from _unsupported(section, frozenset(), f"{name}.")


def _unsupported(values: BaseModel, supported: frozenset[str], prefix: str = "") -> Iterator[str]:
    """Yield the options that differ from their defaults and are not supported, with their values.

    Args:
        values: configuration, or a group of options in one.
        supported: dotted names of options and of groups.
        prefix: dotted name of the group, with a dot at its end.
    """
    for field, info in type(values).model_fields.items():
        name, value = f"{prefix}{field}", getattr(values, field)
        default = info.get_default(call_default_factory=True)
        if name in supported or value == default or (name, value) == _ONCE_PER_CALL:
            continue
        # A group is supported in full, by its own name, or option by option.
        by_option = any(option.startswith(f"{name}.") for option in supported)
        if isinstance(value, BaseModel) and (by_option or isinstance(default, BaseModel)):
            yield from _unsupported(value, supported, f"{name}.")
        else:
            yield f"{name} = {value!r}"
