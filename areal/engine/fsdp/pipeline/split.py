"""Which stage of a pipeline holds which layers of a model, and a model of which only that part is left."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.api.config import FSDPConfig
from areal.api.parallel import ParallelDims
from areal.engine.fsdp.pipeline.schedule_specs import ScheduleSpec
from areal.engine.model.packed_lm import PackedCausalLM


class PassThrough(nn.Module):
    """Stands where another stage has a module: passes on what it is given, and keeps the settings that the model around it may ask for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(module).items() if name not in vars(self)})

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


@dataclass(frozen=True)
class DecoderNames:
    """Where the parts of a decoder are, by their names in the model.

    Attributes:
        name: of the decoder. layers, norm: within it; the norm comes after the last layer.
    """

    name: str
    layers: str
    norm: str


@dataclass(frozen=True)
class PipelineSplit:
    """How a model is spread over the stages of a pipeline. The first has the embedding too, the last the norm and the heads.

    Attributes:
        spans: layers of each stage, where there are several. ranks: pipeline rank of each stage.
        decoder: the parts of the model; ``None`` where there is one stage.
    """

    spans: tuple[range, ...]
    ranks: tuple[int, ...]
    decoder: DecoderNames | None = None

    @classmethod
    def none(cls) -> PipelineSplit:
        """One stage has everything."""
        return cls((range(0),), (0,))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def rank_of(self, name: str) -> int:
        """The pipeline rank that holds a tensor of :class:`PackedCausalLM`; of a shared one, the first."""
        if self.decoder is None:
            return 0
        inside = f"hf.{self.decoder.name}."
        layers = f"{inside}{self.decoder.layers}."
        if name.startswith(layers):
            number = int(name.removeprefix(layers).split(".")[0])
            return self.ranks[next(stage for stage, span in enumerate(self.spans) if number in span)]
        in_front = name.startswith(inside) and not name.startswith(f"{inside}{self.decoder.norm}.")
        return self.ranks[0 if in_front else -1]


def plan_pipeline_split(
    full_model: PackedCausalLM, dims: ParallelDims, spec: ScheduleSpec, config: FSDPConfig
) -> PipelineSplit:
    """Spread the layers of a model over the stages of a layout.

    Args:
        full_model: may be on the meta device. spec: of the schedule.

    Raises:
        ValueError: this model or this number of layers cannot be spread so; says why.
    """
    layers, stages = full_model.hf.config.get_text_config().num_hidden_layers, dims.pp * dims.vpp
    counts = config.pipeline_layers
    if counts is not None and (len(counts) != stages or sum(counts) != layers):
        raise ValueError(
            f"fsdp.pipeline_layers = {counts}: give {stages} numbers, one for each stage of backend = '{dims}', that add up to the "
            f"{layers} layers of the model"
        )
    if stages == 1:
        return PipelineSplit.none()
    if layers < stages:
        raise ValueError(
            f"backend = '{dims}' has {stages} stages, and the model {layers} layers: every stage needs one; choose a smaller p or v"
        )
    spans, start = [], 0
    for count in counts or even_counts(layers, stages):
        spans.append(range(start, start + count))
        start += count
    decoder = decoder_names(full_model.hf)
    check_chain(full_model.hf, decoder)
    return PipelineSplit(tuple(spans), tuple(spec.rank_of(stage, dims.pp) for stage in range(stages)), decoder)


def even_counts(layers: int, stages: int) -> list[int]:
    """Layers of each stage. Those that are left over go to the stages in the middle, then to the first: the embedding and the head, at
    the ends, are work too, and the head more of it."""
    least, left = divmod(layers, stages)
    in_turn = [*range(1, stages - 1), 0, stages - 1]
    return [least + (stage in in_turn[:left]) for stage in range(stages)]


def decoder_names(hf: PreTrainedModel) -> DecoderNames:
    """The parts of a decoder that is an embedding, a list of layers and a norm, and has no other parameters.

    Raises:
        ValueError: it has others, or some of these are missing.
    """
    decoder = hf.get_decoder()
    layer_classes = set(hf._no_split_modules or ())
    lists = [
        name
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and {type(layer).__name__ for layer in child} <= layer_classes
    ]
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
    """Refuse a decoder that does something of its own between embedding, layers and norm: a later stage would do it again.

    Tried with stand-ins for all three: what comes out must be what went in, with what the last layer added.

    Raises:
        ValueError: it does; says what was tried.
    """
    probe: Any = copy.deepcopy(hf.get_decoder())
    layers, seen = getattr(probe, names.layers), list[Tensor]()
    for number, layer in enumerate(layers):
        layers[number] = PassThrough(layer)
    setattr(probe, names.norm, PassThrough(getattr(probe, names.norm)))
    probe.set_input_embeddings(PassThrough(probe.get_input_embeddings()))
    probe = probe.to_empty(device="cpu").eval()
    for buffer in probe.buffers():
        buffer.zero_()
    layers[-1].register_forward_hook(lambda module, args, out: out + 1)
    getattr(probe, names.norm).register_forward_hook(lambda module, args, out: seen.append(args[0]))
    x = torch.rand(1, 2, hf.config.get_text_config().hidden_size)
    try:
        out = probe(inputs_embeds=x, position_ids=torch.arange(2)[None], attention_mask=None, use_cache=False)
        unchanged = bool(torch.equal(out.last_hidden_state, x + 1) and len(seen) == 1 and torch.equal(seen[0], x + 1))
        why = "changes hidden states outside its layers"
    except Exception as error:
        unchanged, why = False, f"does not run on hidden states ({type(error).__name__}: {error})"
    if not unchanged:
        raise ValueError(_not_splittable(hf, why))


def build_stage(full_model: PackedCausalLM, split: PipelineSplit, stage: int) -> PackedCausalLM:
    """A copy of a model on the meta device of which only one stage is left, under the same names."""
    model: Any = copy.deepcopy(full_model)
    if split.decoder is None:
        return model
    decoder = model.hf.get_decoder()
    layers = getattr(decoder, split.decoder.layers)
    for number, layer in enumerate(layers):
        if number not in split.spans[stage]:
            layers[number] = PassThrough(layer)
    if stage > 0:
        decoder.set_input_embeddings(PassThrough(decoder.get_input_embeddings()))
    if stage < len(split.spans) - 1:
        setattr(decoder, split.decoder.norm, PassThrough(getattr(decoder, split.decoder.norm)))
        model.hf.set_output_embeddings(PassThrough(model.hf.get_output_embeddings()))
        model.value_head, model.has_head = None, False
    return model


def _not_splittable(hf: PreTrainedModel, why: str) -> str:
    return (
        f"model type {hf.config.model_type!r} cannot be cut into pipeline stages: {type(hf.get_decoder()).__name__} {why}; "
        "leave p out"
    )
