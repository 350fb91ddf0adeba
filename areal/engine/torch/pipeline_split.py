"""Distribution of a model's layers over pipeline stages, and construction of the model of one stage."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.api.parallel import ParallelDims
from areal.api.sections.fsdp import FSDPConfig
from areal.engine.fsdp.pipeline.schedule_specs import ScheduleSpec
from areal.engine.model.heads import decoder_of
from areal.engine.model.packed_lm import PackedCausalLM


class PassThrough(nn.Module):
    """Replaces a module of another stage: returns its input, and keeps attributes that the model may read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(module).items() if name not in vars(self)})

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


@dataclass(frozen=True)
class DecoderNames:
    """Names of the components of a decoder.

    Attributes:
        name: name of the decoder in the model.
        layers: name of the list of layers within the decoder.
        norm: name of the norm after the last layer, within the decoder.
    """

    name: str
    layers: str
    norm: str


@dataclass(frozen=True)
class PipelineSplit:
    """Distribution of a model over pipeline stages.

    The first stage also has the embedding, the last one the norm and the heads.

    Attributes:
        spans: range of layers of each stage, if there are several.
        ranks: pipeline rank of each stage.
        decoder: names of the decoder's components; ``None`` with a single stage.
    """

    spans: tuple[range, ...]
    ranks: tuple[int, ...]
    decoder: DecoderNames | None = None

    @classmethod
    def none(cls) -> PipelineSplit:
        """Return the split with a single stage."""
        return cls((range(0),), (0,))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def rank_of(self, name: str) -> int:
        """Return the pipeline rank of a tensor of :class:`PackedCausalLM`; of a shared one, the first rank."""
        if self.decoder is None:
            return 0
        inside = f"hf.{self.decoder.name}."
        layers = f"{inside}{self.decoder.layers}."
        # A layer: find the stage whose range contains it.
        if name.startswith(layers):
            number = int(name.removeprefix(layers).split(".")[0])
            return self.ranks[next(stage for stage, span in enumerate(self.spans) if number in span)]
        # Anything else: the embedding is on the first stage, norm and heads on the last.
        in_front = name.startswith(inside) and not name.startswith(f"{inside}{self.decoder.norm}.")
        return self.ranks[0 if in_front else -1]


def plan_pipeline_split(
    full_model: PackedCausalLM, dims: ParallelDims, spec: ScheduleSpec, config: FSDPConfig
) -> PipelineSplit:
    """Distribute the layers of a model over the stages of a layout.

    Args:
        full_model: model, possibly on the meta device.
        dims: layout.
        spec: pipeline schedule.
        config: FSDP settings, with an optional number of layers for each stage.

    Raises:
        ValueError: this model or number of layers cannot be distributed in this way.
    """
    layers, stages = full_model.hf.config.get_text_config().num_hidden_layers, dims.pp * dims.vpp
    counts = config.pipeline_layers
    if counts is not None and (len(counts) != stages or sum(counts) != layers):
        raise ValueError(
            f"fsdp.pipeline_layers = {counts}: give {stages} numbers, one for each stage of backend = '{dims}', that add up to the "
            f"{layers} layers of the model"
        )
    # Without a pipeline any model is accepted.
    if stages == 1:
        return PipelineSplit.none()
    if layers < stages:
        raise ValueError(
            f"backend = '{dims}' has {stages} stages, and the model {layers} layers: every stage needs one; choose a smaller p or v"
        )
    # Consecutive ranges with the given number of layers.
    spans, start = [], 0
    for count in counts or even_counts(layers, stages):
        spans.append(range(start, start + count))
        start += count
    # Reject models whose decoder is more than a chain of layers.
    decoder = decoder_names(full_model.hf)
    check_chain(full_model.hf, decoder)
    return PipelineSplit(tuple(spans), tuple(spec.rank_of(stage, dims.pp) for stage in range(stages)), decoder)


def even_counts(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage.

    Remaining layers go to the stages in the middle, then to the first: embedding and head take time, too, and the
    head more.
    """
    least, left = divmod(layers, stages)
    in_turn = [*range(1, stages - 1), 0, stages - 1]
    return [least + (stage in in_turn[:left]) for stage in range(stages)]


def decoder_names(hf: PreTrainedModel) -> DecoderNames:
    """Return the names of a decoder's components.

    The decoder must consist of an embedding, a list of layers and a norm only.

    Raises:
        ValueError: the decoder has other parameters, or a component is missing.
    """
    decoder = decoder_of(hf)
    layer_classes = set(hf._no_split_modules or ())
    # The list whose modules are decoder layers, according to transformers.
    lists = [
        name
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and {type(layer).__name__ for layer in child} <= layer_classes
    ]
    # All other children with parameters: exactly one is expected, the norm.
    embedding = decoder.get_input_embeddings()
    others = [
        name
        for name, child in decoder.named_children()
        if child is not embedding and name not in lists and next(child.parameters(), None) is not None
    ]
    if len(lists) != 1 or len(others) != 1:
        raise ValueError(
            _not_splittable(
                hf, f"has lists of layers {lists} and {others} beside its embedding, instead of one list and one norm"
            )
        )
    name = next(name for name, module in hf.named_modules() if module is decoder)
    return DecoderNames(name, lists[0], others[0])


@torch.no_grad()
def check_chain(hf: PreTrainedModel, names: DecoderNames) -> None:
    """Check that a decoder does not change hidden states outside its layers: every stage would repeat the change.

    The check runs the decoder with :class:`PassThrough` modules for embedding, layers and norm. The output must be
    the input plus the change of the last layer, and no layer may see the decoder's input beside its own: a later stage has it not.

    Raises:
        ValueError: the decoder changes hidden states elsewhere, or hands its input to layers, or does not run on them.
    """
    probe: Any = copy.deepcopy(decoder_of(hf))
    layers, seen = getattr(probe, names.layers), list[Tensor]()
    # Replace embedding, layers and norm; the rest of the decoder's forward stays.
    for number, layer in enumerate(layers):
        layers[number] = PassThrough(layer)
    setattr(probe, names.norm, PassThrough(getattr(probe, names.norm)))
    probe.set_input_embeddings(PassThrough(probe.get_input_embeddings()))
    # No parameters are left: buffers need memory, but not values.
    probe = probe.to_empty(device="cpu").eval()
    for buffer in probe.buffers():
        buffer.zero_()
    # The last layer adds 1, and the input of the norm is recorded.
    layers[-1].register_forward_hook(lambda module, args, out: out + 1)
    getattr(probe, names.norm).register_forward_hook(lambda module, args, out: seen.append(args[0]))
    x = torch.rand(1, 2, hf.config.get_text_config().hidden_size)
    beside: list[bool] = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args, options: beside.extend(_is_equal(each, x) for each in (*args[1:], *options.values())),
            with_kwargs=True,
        )
    try:
        out = probe(inputs_embeds=x, position_ids=torch.arange(2)[None], attention_mask=None, use_cache=False)
        # Both the norm's input and the output must be exactly x + 1.
        unchanged = bool(torch.equal(out.last_hidden_state, x + 1) and len(seen) == 1 and torch.equal(seen[0], x + 1))
        why = "changes hidden states outside its layers"
        if any(beside):
            unchanged, why = False, "gives layers its input beside the hidden states before them"
    except Exception as error:
        unchanged, why = False, f"does not run on hidden states ({type(error).__name__}: {error})"
    if not unchanged:
        raise ValueError(_not_splittable(hf, why))


def _is_equal(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and torch.equal(value, x)


def build_stage(full_model: PackedCausalLM, split: PipelineSplit, stage: int) -> PackedCausalLM:
    """Return a copy of a model on the meta device that contains only one stage, with the same names."""
    model: Any = copy.deepcopy(full_model)
    if split.decoder is None:
        return model
    decoder = decoder_of(model.hf)
    layers = getattr(decoder, split.decoder.layers)
    # Layers keep their numbers, so that names stay those of the full model.
    for number, layer in enumerate(layers):
        if number not in split.spans[stage]:
            layers[number] = PassThrough(layer)
    # Only the first stage embeds tokens; only the last one has the norm and the heads.
    if stage > 0:
        decoder.set_input_embeddings(PassThrough(decoder.get_input_embeddings()))
    if stage < len(split.spans) - 1:
        setattr(decoder, split.decoder.norm, PassThrough(getattr(decoder, split.decoder.norm)))
        model.hf.set_output_embeddings(PassThrough(model.hf.get_output_embeddings()))
        model.value_head, model.has_head = None, False
    return model


def _not_splittable(hf: PreTrainedModel, why: str) -> str:
    return (
        f"model type {hf.config.model_type!r} cannot be cut into pipeline stages: {type(decoder_of(hf)).__name__} {why}; "
        "leave p out"
    )
