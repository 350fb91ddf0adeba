"""Weights of a Megatron-Core model under Hugging Face names: read in slices, streamed as full tensors, written from
slices.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.api.weights import NamedTensor, SelectName
from areal.engine.checkpoint.gather_slices import Slice, SliceKey
from areal.engine.checkpoint.huggingface import Export, HFWeights, ModelCard
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.checkpoint.tensor_layout import disk_layout, joined
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.optimizer.main_parameters import main_parameters, present_optimizers
from areal.engine.megatron.weight_mapping import EMBEDDING, LocalParameter, local_parameters
from areal.engine.model.classifier import VALUE_HEAD
from areal.engine.model.hub import model_folder
from areal.engine.model.random_init import draw
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box, gathered_dtype

BUCKET_BYTES = 256 * 2**20
"""Maximum size of the full tensors that are streamed at once, unless one tensor is larger."""

Fill = Callable[[Iterable[Slice]], None]
"""Function that fills slices of Hugging Face tensors."""


class MegatronWeights:
    """The weights of one rank's chunks. The constructor is collective.

    In bf16 runs the optimizer's float32 main parameters are the weights, and the model's parameters are rounded
    copies. Both are read from files and drawn at random. Checkpoints contain the main parameters.

    Args:
        chunks: model chunks of this rank.
        hf: configuration of the Hugging Face model.
        groups: process groups of the layout.
        control: control plane over all ranks.
        gradients: returns a function from local parameters to their full gradients, reduced over replicas.
            Collective.
        finish_param_gather: finishes pending gathers of parameters. Collective.
        onload_main_parameters: brings back main parameters that were offloaded.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPT],
        hf: PretrainedConfig,
        groups: ProcessGroupCollection,
        control: ControlPlane,
        gradients: Callable[[], Callable[[LocalParameter], Tensor]],
        finish_param_gather: Callable[[], None],
        onload_main_parameters: Callable[[], None],
    ) -> None:
        self.local_params = [local_param for chunk in chunks for local_param in local_parameters(chunk, hf)]
        self._hf, self._group = hf, _model_group(groups)
        self._gradients, self._finish_gather = gradients, finish_param_gather
        self._onload_mains = onload_main_parameters
        self._mains: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._export_float32 = False
        self._exchange_specs(control)

    def _exchange_specs(self, control: ControlPlane) -> None:
        """Exchange the tensors of all ranks: find those of the full model, and the slices that this rank streams."""
        untied = [local_param for local_param in self.local_params if not local_param.tied]
        own_entries = [
            (
                local_param.order,
                [TensorSpec(piece.name, local_param.parameter.dtype, piece.shape) for piece in local_param.mapped_rows],
                [piece.key for piece in local_param.slices(local_param.parameter.detach().view(-1))],
                local_param.parameter.requires_grad,
            )
            for local_param in untied
        ]
        entries_by_rank = control.gather(own_entries)
        specs_by_name: dict[str, TensorSpec] = {}
        self.trained: set[str] = set()
        # Order the tensors as in the model, each name once.
        entries = sorted(
            (entry for entries_of_rank in entries_by_rank for entry in entries_of_rank), key=lambda entry: entry[0]
        )
        for _, specs, _, trained in entries:
            for spec in specs:
                specs_by_name.setdefault(spec.name, spec)
            self.trained |= {spec.name for spec in specs if trained}
        self._specs = list(specs_by_name.values())
        # Of several ranks with the same slice, the first one streams it.
        owner: dict[SliceKey, int] = {}
        for rank in dist.get_process_group_ranks(self._group):
            for _, _, keys, _ in entries_by_rank[rank]:
                for key in keys:
                    owner.setdefault(key, rank)
        self._owned = {key for key, rank in owner.items() if rank == control.rank}
        # A fused parameter contains several tensors: find the parameters of a tensor quickly.
        self._params_by_name: dict[str, list[LocalParameter]] = {}
        for local_param in untied:
            for name in local_param.names:
                self._params_by_name.setdefault(name, []).append(local_param)

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(math.prod(known.shape) for known in self._specs)

    # ---- in

    def load(self, config: TrainEngineConfig, optimizer: ChainedOptimizer | None) -> None:
        """Load the initial weights from ``config.path``, or draw random ones. A value head without a file is zero.

        Args:
            config: configuration of the engine.
            optimizer: optimizer over the chunks, or ``None``. Its main parameters are kept equal to the weights
                from now on.

        Raises:
            ValueError: the files are missing, damaged, or of another model; names file and key.
        """
        self._mains = _main_parameters(optimizer)
        self._export_float32 = optimizer is not None and config.dtype == "bfloat16"
        if config.init_from_scratch:
            self._draw(config.seed, torch_dtype(config.master_dtype))
            return
        folder = model_folder(config.path)
        self.check(folder)
        self._read(folder)

    def check(self, folder: Path) -> None:
        """Compare keys and shapes of a model directory with the full model, without reading values.

        Raises:
            ValueError: the files are missing, unreadable or of another model; names file and key.
        """
        with self._files(folder) as files:
            files.check({spec.name: spec.shape for spec in self._specs}, _model_class(self._hf))

    def read(self, folder: Path) -> None:
        """Fill this rank's parameters from files that :meth:`check` has accepted. Collective.

        Main parameters are filled without rounding. Each rank reads only its own slices.
        """
        self.complete()
        self._read(folder)

    def fill(self, fill: Fill) -> None:
        """Fill this rank's parameters, and main parameters without rounding.

        Args:
            fill: function that fills slices, in host memory in float32 or wider.
        """
        self.complete()
        for local_param in self.local_params:
            self._fill_parameter(local_param, fill)

    def complete(self) -> None:
        """Prepare reads and writes of parameters and main parameters: finish pending gathers, and bring back what is offloaded. Collective."""
        self._finish_gather()
        self._onload_mains()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the full model's tensors, by name."""
        return {spec.name: tuple(spec.shape) for spec in self._specs}

    def _read(self, folder: Path) -> None:
        with self._files(folder) as files:
            for local_param in self.local_params:
                self._fill_parameter(local_param, _filled_with(files.read))

    def _draw(self, seed: int, dtype: torch.dtype) -> None:
        def fill_block(block: dict[str, Tensor]) -> None:
            for local_param in self.local_params:
                if local_param.names[0] in block:
                    self._fill_parameter(local_param, _filled_with(lambda name, box: block[name][box]))

        draw_weights(self._hf, seed, dtype, fill_block)
        # transformers does not know the value head: it is zero.
        for parameter in (
            local_param.parameter for local_param in self.local_params if local_param.names[0] in VALUE_HEAD
        ):
            parameter.data.zero_()
            if parameter in self._mains:
                self._mains[parameter][0].zero_()

    @torch.no_grad()
    def _fill_parameter(self, local_param: LocalParameter, fill: Fill) -> None:
        parameter = local_param.parameter
        # Assemble the local tensor in float32 or wider, so that main parameters are not rounded. Padding stays
        # zero.
        local = torch.zeros(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32))
        fill(local_param.slices(local.view(-1)))
        parameter.copy_(local)
        if parameter in self._mains:
            # A distributed optimizer has a range of the flattened parameter.
            main, start = self._mains[parameter]
            main.copy_(local.view(-1)[start : start + len(main)])

    def _files(self, folder: Path) -> HFWeights:
        tied = {EMBEDDING[0]: ["lm_head.weight"]} if self._hf.tie_word_embeddings else {}
        return HFWeights(folder, tied, value_head=any(spec.name in VALUE_HEAD for spec in self._specs))

    # ---- out

    def named_tensors(
        self, *, dtype: torch.dtype | None = None, exact: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        """Yield all weights under their Hugging Face names, in the order of the model.

        Tensors are full, on the device. A tied weight comes once. Collective: every rank must iterate to the end.

        Args:
            dtype: dtype that the caller casts the tensors to. Slices are cast before the exchange if it is narrower than theirs.
            exact: returns True for names whose tensors keep the dtype of the parameters. Default: none.
        """
        self._finish_gather()
        kept = {spec.name for spec in self._specs if exact is not None and exact(spec.name)}
        specs = [
            replace(spec, dtype=gathered_dtype(spec.dtype, None if spec.name in kept else dtype))
            for spec in self._specs
        ]
        yield from self._stream(lambda local_param: local_param.parameter.detach(), specs)

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients of all trained weights, in the same way."""
        value = self._gradients()
        dtype = value(self.local_params[0]).dtype
        yield from self._stream(
            value, [replace(spec, dtype=dtype) for spec in self._specs if spec.name in self.trained]
        )

    def export(self) -> Export:
        """Return the tensors to write: float32 main parameters if the optimizer has them, else the parameters.
        Collective.
        """
        self.complete()
        specs = [
            TensorSpec(spec.name, torch.float32 if self._export_float32 else spec.dtype, spec.shape)
            for spec in self._specs
        ]
        model = _model_class(self._hf)
        generation = GenerationConfig.from_model_config(self._hf) if model.can_generate() else None
        return Export(specs, self._export_slices(), ModelCard(self._hf, model, generation))

    def _export_slices(self) -> Iterator[Slice]:
        for local_param in self.local_params:
            if local_param.tied:
                continue
            if not self._export_float32:
                yield from local_param.slices(local_param.parameter.detach().view(-1))
            # Each rank writes its range of the main parameters; parameters that are not trained do not have main
            # parameters.
            elif local_param.parameter in self._mains:
                main, start = self._mains[local_param.parameter]
                yield from local_param.slices(main, start)
            elif not local_param.parameter.requires_grad:
                yield from local_param.slices(local_param.parameter.detach().view(-1))

    @torch.no_grad()
    def _stream(
        self, value: Callable[[LocalParameter], Tensor], tensors: Sequence[TensorSpec]
    ) -> Iterator[NamedTensor]:
        """Yield full tensors, bucket by bucket, in the dtypes of their specs.

        The owner of a slice copies it to its position in a zeroed bucket. Buckets are summed over ranks as
        integers, so that adding zeros changes no bit.
        """
        device = self.local_params[0].parameter.device
        for bucket in self._buckets(tensors):
            sizes = [torch.Size(spec.shape).numel() for spec in bucket]
            filled_up = -(-sum(sizes) // 8) * 8  # to whole int64
            flat = torch.zeros(filled_up, dtype=bucket[0].dtype, device=device)
            values = flat[: sum(sizes)].split(sizes)
            full = {spec.name: x.view(spec.shape) for spec, x in zip(bucket, values, strict=True)}
            # Copy the slices that this rank owns.
            for name, tensor in full.items():
                for local_param in self._params_by_name.get(name, ()):
                    for piece in local_param.slices(value(local_param).reshape(-1)):
                        if piece.name == name and piece.key in self._owned:
                            tensor[piece.box] = piece.values
            if dist.get_world_size(self._group) > 1:
                dist.all_reduce(flat.view(torch.int64), group=self._group)
            yield from (NamedTensor(name, tensor) for name, tensor in full.items())

    @staticmethod
    def _buckets(tensors: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
        """Yield lists of tensors of one dtype, in order, within the size of a bucket."""
        bucket: list[TensorSpec] = []
        size = 0
        for spec in tensors:
            # A bucket is one flat tensor: one dtype, up to the maximum size.
            if bucket and (size + spec.nbytes > BUCKET_BYTES or spec.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(spec)
            size += spec.nbytes
        if bucket:
            yield bucket


def _filled_with(values: Callable[[str, Box], Tensor]) -> Fill:
    """Return a function that fills slices with boxes of tensors by name."""

    def fill(slices: Iterable[Slice]) -> None:
        for piece in slices:
            piece.values.copy_(values(piece.name, piece.box))

    return fill


def _main_parameters(optimizer: ChainedOptimizer | None) -> dict[nn.Parameter, tuple[Tensor, int]]:
    """Return the optimizer's float32 copies of bf16 parameters: flat, with their position in the flattened parameter."""
    return {
        parameter: (main.detach().view(-1), start)
        for inner in present_optimizers(optimizer)
        for parameter, main, start in main_parameters(inner)
        if main.dtype != parameter.dtype
    }


def _model_class(hf: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of this model."""
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)])


def _model_group(groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """Return the smallest group of ranks that together have the full model."""
    # Dense layers need all tensor-parallel ranks, experts all ranks that divide experts.
    tp, experts = groups.tp.size(), groups.ep.size() * groups.expt_tp.size()
    if tp % experts == 0:
        return groups.mp
    return groups.tp_ep_pp if experts % tp == 0 else groups.intra_dist_opt


def draw_weights(
    config: PretrainedConfig, seed: int, dtype: torch.dtype, take: Callable[[dict[str, Tensor]], None]
) -> None:
    """Draw the weights of a model from its configuration. The full model is never in memory.

    Args:
        config: configuration of the Hugging Face model.
        seed: seed of the weights.
        dtype: dtype in which weights are drawn.
        take: called with the tensors of each block by their names on disk, in full and on the CPU.
    """
    with torch.device("meta"):
        # A copy, because building a model changes the configuration.
        hf = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    layout = disk_layout(hf)

    # One drawn tensor may be several on disk, e.g. stacked experts.
    def named(block: dict[str, Tensor]) -> None:
        take(dict(joined((piece, piece.cut(full)) for name, full in block.items() for piece in layout[name])))

    draw(hf, seed, named)
