"""The weights of a Megatron-Core model from and to Hugging Face names: read in slices, streamed in full, written from slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.api.weights import NamedTensor
from areal.engine.checkpoint.gather_slices import Slice, SliceKey
from areal.engine.checkpoint.huggingface import VALUE_HEAD, Export, HFWeights, ModelCard
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.random_init import draw_weights
from areal.engine.megatron.weight_mapping import EMBEDDING, LocalParameter, local_parameters
from areal.engine.model.hub import model_folder
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

BUCKET_BYTES = 256 * 2**20
"""Most bytes of full tensors that are streamed at once, unless one tensor is larger."""

Values = Callable[[str, Box], Tensor]
"""A part of a Hugging Face tensor, by its name."""


class MegatronWeights:
    """The weights of one rank's chunks. In bf16 runs the optimizer's float32 main parameters are the weights, and the parameters are these
    rounded: both are read from a file and drawn at random, and the main parameters are what a checkpoint holds. Collective to make.

    Args:
        chunks: of this rank. hf: configuration of the Hugging Face model.
        groups: of the layout. control: over all ranks.
        gradients: the whole gradient of a local parameter, reduced over its replicas. Collective.
        settle: called before weights are looked at, so that they are there. Collective.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPT],
        hf: PretrainedConfig,
        groups: ProcessGroupCollection,
        control: ControlPlane,
        gradients: Callable[[], Callable[[LocalParameter], Tensor]],
        settle: Callable[[], None],
    ) -> None:
        self.held = [held for chunk in chunks for held in local_parameters(chunk, hf)]
        self._hf, self._group = hf, _whole_model(groups)
        self._gradients, self._settle = gradients, settle
        self._optimizer: ChainedOptimizer | None = None
        self._mains: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._written_wide = False
        self._meet(control)

    def _meet(self, control: ControlPlane) -> None:
        """Learn what the model has, from what every rank holds, and what this rank streams."""
        own = [held for held in self.held if not held.tied]
        mine = [
            (
                held.place,
                [TensorSpec(part.name, held.parameter.dtype, part.shape) for part in held.parts],
                [part.key for part in held.slices(held.parameter.detach().view(-1))],
                held.parameter.requires_grad,
            )
            for held in own
        ]
        everyone = control.gather(mine)
        known: dict[str, TensorSpec] = {}
        self._trained: set[str] = set()
        entries = sorted((entry for theirs in everyone for entry in theirs), key=lambda entry: entry[0])
        for _, specs, _, trained in entries:
            for spec in specs:
                known.setdefault(spec.name, spec)
            self._trained |= {spec.name for spec in specs if trained}
        self._known = list(known.values())
        # Of the ranks that hold the same part, the first speaks for it.
        speaker: dict[SliceKey, int] = {}
        for rank in dist.get_process_group_ranks(self._group):
            for _, _, places, _ in everyone[rank]:
                for place in places:
                    speaker.setdefault(place, rank)
        self._spoken = {place for place, rank in speaker.items() if rank == control.rank}
        self._holders: dict[str, list[LocalParameter]] = {}
        for held in own:
            for name in held.names:
                self._holders.setdefault(name, []).append(held)

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(math.prod(known.shape) for known in self._known)

    # ---- in

    def load(self, config: TrainEngineConfig, optimizer: ChainedOptimizer | None) -> None:
        """The first weights: those at ``config.path``, or random ones. A value head without a file is zero.

        Args:
            optimizer: over the chunks. Its main parameters are kept in step from here on.

        Raises:
            ValueError: the files are missing, damaged, or of another model; names file and key.
        """
        self._optimizer, self._mains = optimizer, _main_parameters(optimizer)
        self._written_wide = optimizer is not None and config.dtype == "bfloat16" and _has_mains(optimizer)
        if config.init_from_scratch:
            self._draw(config.seed, torch_dtype(config.master_dtype))
            return
        folder = model_folder(config.path)
        self.check(folder)
        self._read(folder)

    def check(self, folder: Path) -> None:
        """Compare keys and shapes of a model directory with the whole model, reading no values.

        Raises:
            ValueError: the files are missing, unreadable or of another model; names file and key. Or the optimizer has copies of the
                weights that cannot follow.
        """
        if self._optimizer is not None and not _has_mains(self._optimizer) and _has_stepped(self._optimizer):
            raise ValueError(
                "megatron.optimizer_state_dtype = 'bfloat16': this optimizer keeps float32 weights to itself once it has made a step, and "
                "these cannot be loaded: load weights before the first step, or set optimizer_state_dtype='float32'"
            )
        with self._files(folder) as files:
            files.check({known.name: known.shape for known in self._known}, _model_class(self._hf))

    def read(self, folder: Path) -> None:
        """Fill this rank's parameters, and their float32 main parameters unrounded, from files that :meth:`check` has accepted. Reads this
        rank's slices. Collective.
        """
        self._settle()
        self._read(folder)

    def _read(self, folder: Path) -> None:
        with self._files(folder) as files:
            for held in self.held:
                self._fill(held, files.read)

    def _draw(self, seed: int, dtype: torch.dtype) -> None:
        def take(block: dict[str, Tensor]) -> None:
            for held in self.held:
                if held.names[0] in block:
                    self._fill(held, lambda name, box: block[name][box])

        draw_weights(self._hf, seed, dtype, take)
        for parameter in (held.parameter for held in self.held if held.names == (VALUE_HEAD,)):
            parameter.data.zero_()
            if parameter in self._mains:
                self._mains[parameter][0].zero_()

    @torch.no_grad()
    def _fill(self, held: LocalParameter, values: Values) -> None:
        parameter = held.parameter
        local = torch.zeros(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32))
        for part in held.slices(local.view(-1)):
            part.values.copy_(values(part.name, part.box))
        parameter.copy_(local)
        if parameter in self._mains:
            main, start = self._mains[parameter]
            main.copy_(local.view(-1)[start : start + len(main)])

    def _files(self, folder: Path) -> HFWeights:
        tied = {EMBEDDING[0]: ["lm_head.weight"]} if self._hf.tie_word_embeddings else {}
        return HFWeights(folder, tied, value_head=any(known.name == VALUE_HEAD for known in self._known))

    # ---- out

    def named_tensors(self) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, in the order of the model: full, in the dtype of the parameters, on the device. A
        tied weight comes once. Collective: every rank iterates to the end.
        """
        self._settle()
        yield from self._stream(lambda held: held.parameter.detach())

    def named_gradients(self) -> Iterator[NamedTensor]:
        """The gradients of all weights that are trained, likewise."""
        value = self._gradients()
        yield from self._stream(value, dtype=value(self.held[0]).dtype, trained=True)

    def export(self) -> Export:
        """What is to be written: float32 main parameters where the optimizer has them, else the parameters in their own dtype. Collective."""
        self._settle()
        specs = [
            TensorSpec(known.name, torch.float32 if self._written_wide else known.dtype, known.shape)
            for known in self._known
        ]
        model = _model_class(self._hf)
        generation = GenerationConfig.from_model_config(self._hf) if model.can_generate() else None
        return Export(specs, self._written_slices(), ModelCard(self._hf, model, generation))

    def _written_slices(self) -> Iterator[Slice]:
        for held in self.held:
            if held.tied:
                continue
            if not self._written_wide:
                yield from held.slices(held.parameter.detach().view(-1))
            elif held.parameter in self._mains:
                main, start = self._mains[held.parameter]
                yield from held.slices(main, start)
            elif not held.parameter.requires_grad:
                yield from held.slices(held.parameter.detach().view(-1))

    @torch.no_grad()
    def _stream(
        self, value: Callable[[LocalParameter], Tensor], dtype: torch.dtype | None = None, *, trained: bool = False
    ) -> Iterator[NamedTensor]:
        """Full tensors, bucket by bucket: each part is put where it belongs by the one rank that speaks for it, and integers are summed,
        so that the others' zeros change no bit.
        """
        device = self.held[0].parameter.device
        for bucket in self._buckets([known for known in self._known if not trained or known.name in self._trained]):
            sizes = [torch.Size(known.shape).numel() for known in bucket]
            filled_up = -(-sum(sizes) // 8) * 8  # to whole integers
            flat = torch.zeros(filled_up, dtype=dtype or bucket[0].dtype, device=device)
            values = flat[: sum(sizes)].split(sizes)
            full = {known.name: x.view(known.shape) for known, x in zip(bucket, values, strict=True)}
            for name, tensor in full.items():
                for held in self._holders.get(name, ()):
                    for part in held.slices(value(held).reshape(-1)):
                        if part.name == name and part.key in self._spoken:
                            tensor[part.box] = part.values
            if dist.get_world_size(self._group) > 1:
                dist.all_reduce(flat.view(torch.int64), group=self._group)
            yield from (NamedTensor(name, tensor) for name, tensor in full.items())

    @staticmethod
    def _buckets(tensors: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
        """Tensors of one dtype at a time, in order."""
        bucket: list[TensorSpec] = []
        size = 0
        for known in tensors:
            if bucket and (size + known.nbytes > BUCKET_BYTES or known.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(known)
            size += known.nbytes
        if bucket:
            yield bucket


def _has_mains(optimizer: ChainedOptimizer) -> bool:
    """Whether main parameters are tensors of their own here: a precision-aware optimizer keeps them to itself."""
    return not any(part.config.use_precision_aware_optimizer for part in optimizer.chained_optimizers)


def _has_stepped(optimizer: ChainedOptimizer) -> bool:
    return any(not part.is_stub_optimizer and part.optimizer.state for part in optimizer.chained_optimizers)


def _main_parameters(optimizer: ChainedOptimizer | None) -> dict[nn.Parameter, tuple[Tensor, int]]:
    """The float32 copies that the optimizer keeps of bf16 parameters: flat, and where each starts in its parameter. The distributed
    optimizer has a stretch of some of them on each rank; float32 parameters need no copy.
    """
    found: dict[nn.Parameter, tuple[Tensor, int]] = {}
    for part in optimizer.chained_optimizers if optimizer is not None and _has_mains(optimizer) else ():
        if part.is_stub_optimizer:
            continue
        is_distributed = isinstance(part, DistributedOptimizer)
        parameters = getattr(part, "model_float16_groups" if is_distributed else "float16_groups", [])
        mains = getattr(part, "shard_fp32_from_float16_groups" if is_distributed else "fp32_from_float16_groups", [])
        for group, main_group in zip(parameters, mains, strict=True):
            for parameter, main in zip(group, main_group, strict=True):
                start = part._get_model_param_range_map(parameter)["param"].start if is_distributed else 0
                found[parameter] = (main.detach().view(-1), start)
    return found


def _model_class(hf: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' class of this model."""
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)])


def _whole_model(groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """The smallest group of ranks that hold the whole model between them."""
    tp, experts = groups.tp.size(), groups.ep.size() * groups.expt_tp.size()
    if tp % experts == 0:
        return groups.mp
    return groups.tp_ep_pp if experts % tp == 0 else groups.intra_dist_opt
