"""The base class of configurations, which refuses unknown fields and suggests known ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictConfig(BaseModel):
    """Base class of all configurations: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_fields(cls, values: Any) -> Any:
        # A configuration that allows other fields knows them itself.
        strict = cls.model_config.get("extra") == "forbid" and isinstance(values, Mapping)
        for name in values if strict else ():
            if name not in cls.model_fields and (known := meant(name, cls.model_fields)):
                raise ValueError(f"{cls.__name__} has no field {name!r}: did you mean {known!r}?")
        return values


_OTHER_NAMES = {
    "learning_rate": "lr",
    "r": "rank",
    "lora_rank": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rslora",
    "model": "path",
    "model_path": "path",
    "model_name_or_path": "path",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler_type": "lr_scheduler",
    "gradient_checkpointing": "activation_checkpointing",
}
"""Names that other libraries give to fields."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant by another one, or ``None``."""
    known = list(known)
    if _OTHER_NAMES.get(name) in known:
        return _OTHER_NAMES[name]
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)
