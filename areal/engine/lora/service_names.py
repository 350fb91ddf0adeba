"""Names of adapter weights in the files of the hosted Tinker service, which differ from peft's for the output head.

The service and its cookbook call the head ``model.unembed_tokens`` in every model family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from areal.engine.lora.adapter_plan import PREFIX, head_name

SERVICE_HEAD = "model.unembed_tokens"
"""Module of the head in files of the service."""

_T = TypeVar("_T")


def service_head(model: PreTrainedModel) -> str | None:
    """Return the name of the head in the files of an export; ``None`` if the head is not a linear layer.

    With tied embeddings, the head keeps its name in the model: the cookbook would merge an adapter of ``model.unembed_tokens`` into the
    input embedding too, which gives another model without an error. It refuses the head's own name, unless the base model is an untied copy.
    """
    name = head_name(model)
    if name is None:
        return None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return name if head.weight is embedding.weight else SERVICE_HEAD


def has_service_names(weights: Mapping[str, Any]) -> bool:
    """Return whether weights are under the names of the service."""
    return any(name.startswith(f"{PREFIX}{SERVICE_HEAD}.") for name in weights)


def rename_head(
    config: Mapping[str, Any], weights: Mapping[str, _T], old: str, new: str
) -> tuple[dict[str, Any], dict[str, _T]]:
    """Rename the head in the configuration and in the weights of an adapter.

    Args:
        config: content of ``adapter_config.json``. Changed are entries of ``target_modules``, unless that is a regular expression.
        weights: values by their names in the file.
        old, new: names of the module.

    Returns:
        The new configuration and the new weights.
    """
    named = {name.replace(f"{PREFIX}{old}.", f"{PREFIX}{new}.", 1): value for name, value in weights.items()}
    targets = config.get("target_modules")
    # peft names modules by their last components, or in full.
    if targets is None or isinstance(targets, str):
        return dict(config), named
    own = {old, old.rpartition(".")[2]}
    renamed = sorted(new.rpartition(".")[2] if target in own else target for target in targets)
    return {**config, "target_modules": renamed}, named
