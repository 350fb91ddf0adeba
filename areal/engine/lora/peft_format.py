"""Plan adapters with peft and read and write its files. The only module that imports peft; see
:func:`areal.engine.lora.adapter_set.peft_format`.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from areal.api.sections.lora import LoRAConfig
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.lora.adapter_plan import (
    FEED_FORWARD,
    PREFIX,
    AdapterPlan,
    Target,
    decoder_linears,
    head_name,
    layer_kind,
)
from areal.engine.model.hub import model_folder, read_config
from areal.engine.model.media import IMAGE_FAMILIES, model_factory
from areal.engine.model.stacked_experts import stacked_weights
from areal.engine.model.vision import VISION_LAYERS
from areal.utils.dtensor import full_box

logger = logging.getLogger(__name__)

_NAME = "default"

_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types for which peft refuses adapters of ``out_proj``: their fused kernels read its weight."""

_CHANGED_MODEL = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""First part of ``init_lora_weights`` with which peft changes the weights of the base model. Files have factors of the changed weights."""

_OTHER_FORWARD = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "monteclora_config"),
    *("trainable_token_indices", "use_bdlora", "use_qalora"),
)
"""Options of peft with which the forward of an adapter is not ``scale * B @ A @ x`` for every token."""


def plan_adapter(hf: PretrainedConfig, lora: LoRAConfig) -> AdapterPlan:
    """Return the layers of a model that get an adapter.

    Raises:
        ValueError: ``target_modules`` or ``layer_kinds`` match no layer, or one that cannot have an adapter.
    """
    targets, model = lora.target_modules, _meta_model(hf)
    where = (
        f"lora.target_modules = {targets!r}" if lora.layer_kinds is None else f"lora.layer_kinds = {lora.layer_kinds}"
    )
    # peft's own "all-linear" includes stacked experts.
    names: str | Sequence[str] = targets
    if lora.layer_kinds is not None:
        names = _names_of_kinds(model, lora.layer_kinds, where)
    elif targets == "all-linear":
        names = _linear_names(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=names if isinstance(names, str) else list(names),
        use_rslora=lora.rslora,
        lora_dropout=0.0,
        # The layers of a vision tower have names of layers of the decoder.
        exclude_modules=VISION_LAYERS if hf.model_type in IMAGE_FAMILIES else None,
    )
    return _plan_with_peft(model, config, where)


def file_config(plan: AdapterPlan, base: str) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``. Arguments as for :func:`encode_files`.

    It lists the layers. SGLang refuses an adapter whose ``target_modules`` is a regular expression.
    """
    names = [target.key for target in plan.targets]
    return {**plan.config, "base_model_name_or_path": base, "inference_mode": True} | (
        {"target_modules": names} if isinstance(plan.config["target_modules"], str) else {}
    )


def encode_files(plan: AdapterPlan, weights: Mapping[str, Tensor], base: str) -> dict[str, bytes]:
    """Return the files of a directory in peft's format, by name.

    Args:
        plan: layers and configuration of the adapter.
        weights: full weights by peft's names.
        base: directory or hub name of the base model.
    """
    return {
        CONFIG_NAME: json.dumps(file_config(plan, base), indent=2, sort_keys=True).encode(),
        SAFETENSORS_WEIGHTS_NAME: save({name: x.contiguous() for name, x in weights.items()}, {"format": "pt"}),
    }


def service_files(folder: Path, base: str) -> dict[str, bytes]:
    """Return the files of an adapter by name, with the names of the hosted Tinker service for its weights.

    Args:
        folder: directory of the adapter in peft's format.
        base: directory or hub name of the base model.

    Raises:
        ValueError: the model cannot be read.
    """
    model = _meta_model(read_config(base))
    config, weights = json.loads((folder / CONFIG_NAME).read_bytes()), load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    old, new = head_name(model), service_head(model)
    if old is not None and new is not None:
        config, weights = rename_head(config, weights, old, new)
    return {
        CONFIG_NAME: json.dumps(config, indent=2, sort_keys=True).encode(),
        SAFETENSORS_WEIGHTS_NAME: save(weights, {"format": "pt"}),
    }


def read_folder(
    folder: Path, hf: PretrainedConfig, base: str | None, plans: MutableMapping[str, AdapterPlan] | None = None
) -> tuple[AdapterPlan, dict[str, Tensor]]:
    """Read an adapter from a directory in peft's format: its plan, and its full weights by peft's names.

    The head may have the name that the hosted Tinker service gives it.

    Args:
        folder: directory of the adapter.
        hf: configuration of the model.
        base: directory or hub name of the model; ``None`` for random weights. With an adapter of the head, peft also writes a copy of the
            head's own weight, which must be that of the model.
        plans: plans of adapters of this model by their configuration, which is added. A plan takes most of the time of this function.

    Raises:
        ValueError: the adapter is damaged, of another model, or not limited to low-rank factors of linear layers;
            names file and key.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        config = LoraConfig.from_pretrained(str(folder), local_files_only=True)
        weights = load_file(file)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder} has no adapter that peft can read: {type(error).__name__}: {error}") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"{folder / CONFIG_NAME}: an adapter of the kind {type(config).__name__}; only LoRA can be loaded"
        )
    # Dropout only matters for training, and this library does not apply it.
    if config.lora_dropout:
        logger.warning(
            "%s: lora_dropout = %s is left out: nothing is dropped", folder / CONFIG_NAME, config.lora_dropout
        )
    if has_service_names(weights) and (head := head_name(_meta_model(hf))) is not None:
        renamed, weights = rename_head({"target_modules": config.target_modules}, weights, SERVICE_HEAD, head)
        config.target_modules = renamed["target_modules"]
    plans = {} if plans is None else plans
    written = json.dumps(_plain_values(config.to_dict()), sort_keys=True, default=str)
    if written not in plans:
        plans[written] = _plan_with_peft(_meta_model(hf), config, str(folder / CONFIG_NAME))
    plan = plans[written]
    # Compare names and shapes in both directions.
    shapes = plan.shapes
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"{file} has no {name!r}, which {CONFIG_NAME} asks for: it is of another model")
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"{file}: {name!r} has shape {list(weights[name].shape)}, but the model needs {list(shape)}"
            )
    copies = {f"{PREFIX}{target.key}.base_layer.weight": target for target in plan.targets}
    for name in sorted(set(weights) & set(copies)):
        _check_copy(file, name, weights.pop(name), copies[name], hf, base)
    extra = sorted(set(weights) - set(shapes))
    if extra:
        raise ValueError(f"{file} has {extra[0]!r}, which {CONFIG_NAME} does not ask for: it is of another model")
    return plan, weights


def _check_copy(file: Path, name: str, values: Tensor, target: Target, hf: PretrainedConfig, base: str | None) -> None:
    """Check that the copy of a layer's weight in an adapter's file is the weight of the model.

    Raises:
        ValueError: they differ.
    """
    if base is not None and _is_weight_of(target, values, _meta_model(hf), model_folder(base)):
        return
    raise ValueError(
        f"{file} has {name!r}, a weight of the model itself, with other values than {base or 'a model with random weights'}: only adapters "
        "are loaded; save the adapter with save_embedding_layers=False if it belongs to this model"
    )


def _is_weight_of(target: Target, values: Tensor, model: PreTrainedModel, folder: Path) -> bool:
    """Return whether a layer has these values in a model directory, up to their dtype."""
    weight = model.get_submodule(target.key).weight
    # A tied weight is in the files under the name of the embedding.
    names = [key for key, x in model.named_parameters(remove_duplicate=False) if x is weight]
    with TensorFiles.of_model(folder) as files:
        key = next((key for key in names if key in files), None)
        if key is None or files.shape(key) != tuple(values.shape):
            return False
        return torch.equal(files.read(key, full_box(values.shape)).to(values.dtype), values)


def _meta_model(hf: PretrainedConfig) -> PreTrainedModel:
    # A copy, because building a model changes the configuration.
    with torch.device("meta"):
        model: PreTrainedModel = model_factory(hf).from_config(copy.deepcopy(hf))
    return model


def _linear_names(model: PreTrainedModel) -> list[str]:
    """Return the last components of the names of all linear layers except the head.

    In a model with stacked experts, peft would also match the experts with the names of a feed-forward network:
    leave these out.
    """
    stacked = FEED_FORWARD if _has_stacked_experts(model) else frozenset()
    return sorted({name.rpartition(".")[2] for name in _supported_linears(model)} - stacked)


def _supported_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that peft can give an adapter: in Mamba models, all but the last one of a mixer."""
    left_out = "out_proj" if model.config.model_type in _MAMBA else None
    return [name for name in decoder_linears(model) if name.rpartition(".")[2] != left_out]


def _has_stacked_experts(model: PreTrainedModel) -> bool:
    return any(stacked_weights(module) for module in model.modules())


def _names_of_kinds(model: PreTrainedModel, kinds: Collection[str], where: str) -> list[str]:
    """Return names for peft that match exactly the linear layers of some kinds.

    Raises:
        ValueError: the model is without layers of a kind, or has stacked experts, which cannot have adapters.
    """
    if "mlp" in kinds and _has_stacked_experts(model):
        raise ValueError(
            f"{where}: the experts of this model cannot have adapters; leave 'mlp' out, or name layers in lora.target_modules"
        )
    kind_of: dict[str, str] = {name: layer_kind(name) for name in _supported_linears(model)}
    head = head_name(model)
    if head is not None:
        kind_of[head] = "head"
    missing = [kind for kind in kinds if kind not in kind_of.values()]
    if missing:
        raise ValueError(f"{where}: the model has no linear layer of the kind {missing[0]!r}: leave it out")
    chosen = {name for name, kind in kind_of.items() if kind in kinds}
    # Last components are the usual form in files. They do not always tell kinds apart.
    last = {name.rpartition(".")[2] for name in chosen}
    return sorted(last if {name for name in kind_of if name.rpartition(".")[2] in last} == chosen else chosen)


def _plan_with_peft(bare: PreTrainedModel, config: LoraConfig, where: str) -> AdapterPlan:
    # These options train more than low-rank factors.
    if config.use_dora or config.bias != "none" or config.modules_to_save or config.target_parameters:
        raise ValueError(
            f"{where}: only low-rank factors of linear layers are trained; leave out DoRA, biases and further modules"
        )
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(_CHANGED_MODEL):
        raise ValueError(
            f"{where}: init_lora_weights = {start!r} trains factors of changed weights of the model; save the adapter with peft's "
            "path_initial_model_for_weight_conversion, or merge it into the model"
        )
    for option in _OTHER_FORWARD:
        # An older peft does not have all of them.
        if getattr(config, option, None):
            raise ValueError(
                f"{where}: {option} = {getattr(config, option)!r}: an adapter adds scale * B @ A @ x for every token here; load one without it"
            )
    # peft resolves the names: apply it to a model without values.
    with torch.device("meta"):
        try:
            model: Any = get_peft_model(bare, config, adapter_name=_NAME)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    modules: dict[str, Any] = dict(model.named_modules())
    targets = tuple(
        _adapter_target(where, name, module) for name, module in modules.items() if hasattr(module, "lora_A")
    )
    # The configuration as peft writes it: resolved names, sets as sorted lists.
    written = _plain_values(model.peft_config[_NAME].to_dict())
    return AdapterPlan(targets, json.loads(json.dumps(written, default=str)))


def _plain_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with sorted lists in place of sets."""
    return {key: sorted(x) if isinstance(x, set) else x for key, x in config.items()}


def _adapter_target(where: str, name: str, module: Any) -> Target:
    key = name.removeprefix(PREFIX)
    layer: Any = module.get_base_layer()
    # Embeddings and convolutions may match too.
    if not isinstance(module, Linear) or not isinstance(layer, torch.nn.Linear):
        raise ValueError(f"{where} names {key}, which is not a linear layer: leave it out")
    return Target(key, module.r[_NAME], float(module.scaling[_NAME]), layer.in_features, layer.out_features)


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
