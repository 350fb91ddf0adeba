"""The training backend on an engine: one process, or ranks of an engine in Ray."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal.api import FinetuneSpec, MicroBatchSpec
from areal.dispatch import InProcess, WorkerGroup
from areal.engine.checkpoint.atomic_dir import is_complete, verify
from areal.engine.lora.adapter_set import DEFAULT_NAME
from areal.engine.options import process_dims
from areal.engine.registry import engine_class
from areal.tinker.backends.backend import ModelLimits
from areal.tinker.backends.errors import BackendLostError, ServerError, UserError
from areal.tinker.backends.losses.loss_table import loss_keys, make_loss
from areal.tinker.backends.prepared import AdamParams, AdapterSpec, PassResult, PreparedBatch
from areal.tinker.backends.training.adam import step_settings
from areal.tinker.backends.training.adapter_memory import RankMemory, Slot, rank_memory, shortage
from areal.tinker.backends.training.base_model import find_base_model, whole_parameters
from areal.tinker.backends.training.engine_config import EngineBackendConfig
from areal.tinker.backends.training.export import export_adapter
from areal.tinker.backends.training.pass_memory import PassMemory
from areal.tinker.backends.training.passes import (
    SHORT,
    Pass,
    divide_into_calls,
    engine_samples,
    lost_error,
    no_loss,
    no_weight,
    probe_pass,
    protocol_errors,
    rounds_alike,
    run_passes,
    threads,
    vocab_size,
)
from areal.utils.seeding import mixed

logger = logging.getLogger(__name__)

_R = TypeVar("_R")

_ABOUT = "tinker"
"""Entry of a checkpoint's manifest that describes the model."""


class EngineBackend:
    """Implements :class:`~areal.tinker.backends.backend.TrainingBackend` on a group of ranks, which may be this process alone.

    Each model is an adapter of the engine. Samples name their adapter, and short requests of several models may share a call.

    Args:
        model: directory or hub name of the base model.
        backend: engine and layout, such as ``fsdp:d2``.
        config: settings.

    Attributes:
        group: handle of the engine.
        models: adapter of each model, by the id of the model.

    Raises:
        ValueError: the model, the layout or a setting is refused.
    """

    def __init__(self, model: str, backend: str, config: EngineBackendConfig) -> None:
        self._config, self._base = config, find_base_model(model)
        settings = config.engine_config(model, backend, self._base.dtype)
        self._executor = config.executor(process_dims(engine_class(settings.dims.backend), settings).world_size)
        self._numbers = itertools.count()
        self._lost: BaseException | None = None
        self._closed = False
        try:
            self.group = WorkerGroup(settings, self._executor)
            max_tokens = self._base.max_tokens(config.max_tokens)
            self.group.initialize(FinetuneSpec(total_train_steps=1))
            self._begin()
            self._limits = ModelLimits(self.group.run(vocab_size)[0], max_tokens, config.max_rank)
            self._shared_tokens = self._most_shared_tokens(settings.dtype)
        except BaseException:
            self._executor.close()
            raise
        logger.info(
            "base model %s on %s in %s: %d token ids, samples of at most %d tokens, adapters of rank %d or less, by default with alpha %g",
            *(model, settings.dims, settings.dtype, self._limits.vocab_size, max_tokens, config.max_rank, config.alpha),
        )

    def _begin(self) -> None:
        """Begin without models, on an engine that was just initialized."""
        self.models: dict[str, Slot] = {}
        self._selected = DEFAULT_NAME
        self._names = self.group.adapters.names
        self._empty: list[RankMemory] = self.group.run(rank_memory)
        self._pass_memory = {
            train: PassMemory(self.group, self._config.max_tokens_per_mb, functools.partial(self._probe, train))
            for train in (True, False)
        }
        self._lost = None

    def _probe(self, train: bool, tokens: int) -> None:
        """Run a pass with micro-batches of so many tokens on each rank, on the engine's first adapter, which is never trained."""
        dims = self.group.dims
        divided = tokens * dims.cp
        # A stage holds as many micro-batches as there are stages, and up to twice as many if a rank has several stages.
        copies = dims.dp * dims.pp * min(2, dims.vpp)
        probe = probe_pass(DEFAULT_NAME, divided, self._limits.max_tokens, copies)
        spec = MicroBatchSpec(max_tokens_per_mb=divided, overlong="alone")
        run_passes(self.group, self._names, [probe], train=train, mb_spec=spec)

    def _most_shared_tokens(self, dtype: str) -> int:
        """Return the most tokens of a request that shares a call with those of other models."""
        if self._config.max_shared_tokens is not None:
            return self._config.max_shared_tokens
        same = rounds_alike(self._base.name, dtype, self.group.dims, self.group.run(threads)[0])
        return SHORT if same else 0

    # ---- capabilities

    def limits(self) -> ModelLimits:
        return self._limits

    def losses(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        return loss_keys()

    def optimizers(self) -> frozenset[str]:
        return frozenset({"adamw"})

    def batches_models(self) -> bool:
        return self._shared_tokens > 0

    def base_parameters(self) -> Mapping[str, Tensor]:
        return self.group.run(whole_parameters)[0] if isinstance(self._executor, InProcess) else {}

    # ---- models

    def create_model(self, model_id: str, adapter: AdapterSpec) -> None:
        self._require()
        if model_id in self.models:
            raise UserError(f"model_id = {model_id!r}: there is such a model already: choose another id")
        seed = mixed(self._config.seed, model_id) if adapter.seed is None else adapter.seed
        # The description in a checkpoint must not depend on the settings of the server.
        adapter = dataclasses.replace(adapter, alpha=self._config.alpha if adapter.alpha is None else adapter.alpha)
        lora = self._config.lora(adapter)

        def add(name: str) -> None:
            try:
                self.group.adapters.add(name, lora, seed=seed)
            except ValueError as error:
                # The engine names kinds of layers, the client its switches.
                kinds = "train_attn, train_mlp and train_unembed of lora_config select 'attention', 'mlp' and 'head'"
                raise UserError(f"{error} ({kinds})") from error

        self.models[model_id] = self._admit(adapter, add)

    def delete(self, model_id: str) -> None:
        slot = self._slot(model_id)
        with self._errors():
            self._remove(slot)
        del self.models[model_id]

    def _remove(self, slot: Slot) -> None:
        # The selected adapter cannot be removed.
        if self._selected == slot.name:
            self._select(DEFAULT_NAME)
        self.group.adapters.remove(slot.name)
        self._names = self.group.adapters.names

    def _admit(self, adapter: AdapterSpec, add: Callable[[str], None], replaced: Slot | None = None) -> Slot:
        """Add an adapter under a new name if there is memory for it.

        Args:
            adapter: description.
            add: adds it to the engine under a name.
            replaced: model that is removed afterwards.

        Raises:
            UserError: memory is short, or the engine refuses the adapter.
        """
        limit = self._config.max_models
        if limit is not None and replaced is None and len(self.models) >= limit:
            raise UserError(
                f"the server has {len(self.models)} models, and can have {limit}: finish a session or delete a model"
            )
        slot = Slot(f"model-{next(self._numbers)}", adapter)
        with self._errors():
            before = self.group.run(rank_memory)
            add(slot.name)
            # The engine knows what the ranks hold of an adapter once it is there.
            after = self.group.run(rank_memory)
            slot.nbytes = [new.total - old.total for old, new in zip(before, after, strict=True)]
            released = [0] * len(before) if replaced is None else replaced.nbytes
            short = shortage(self._empty, before, after, released, self._budget)
            if short is not None:
                self.group.adapters.remove(slot.name)
                raise UserError(
                    f"memory is short for a model with lora_config.rank = {adapter.rank}, in addition to {len(self.models)} models: {short}: "
                    "lower the rank, or delete a model"
                )
            self._names = self.group.adapters.names
        return slot

    @property
    def _budget(self) -> int | None:
        megabytes = self._config.adapter_memory_mb
        return None if megabytes is None else megabytes * 2**20

    def _slot(self, model_id: str) -> Slot:
        """Return the slot of a model.

        Raises:
            UserError: there is no such model.
            BackendLostError: all models are lost.
        """
        self._require()
        if model_id not in self.models:
            raise UserError(f"model_id = {model_id!r}: there is no such model: create it, or load it from a checkpoint")
        return self.models[model_id]

    def _select(self, name: str) -> None:
        if self._selected != name:
            self.group.adapters.select(name)
            self._selected = name

    # ---- passes

    def forward(self, batches: Sequence[PreparedBatch]) -> list[PassResult | UserError | ServerError]:
        return self._run(batches, train=False)

    def forward_backward(self, batches: Sequence[PreparedBatch]) -> list[PassResult | UserError | ServerError]:
        return self._run(batches, train=True)

    def _run(self, batches: Sequence[PreparedBatch], *, train: bool) -> list[PassResult | UserError | ServerError]:
        """Run requests, each of which fails alone."""
        prepared = [self._attempt(functools.partial(self._prepare, batch)) for batch in batches]
        results: list[Any] = list(prepared)
        indices = [index for index, each in enumerate(prepared) if isinstance(each, Pass)]
        passes = [each for each in prepared if isinstance(each, Pass)]
        for call in divide_into_calls(passes, self._shared_tokens):
            for k, result in zip(call, self._run_call([passes[k] for k in call], train=train), strict=True):
                results[indices[k]] = result
        return results

    def _prepare(self, batch: PreparedBatch) -> Pass:
        slot = self._slot(batch.model_id)
        loss = make_loss(batch.loss, batch.config)
        return Pass(batch, slot.name, loss, engine_samples(batch.data, loss))

    def _run_call(self, passes: Sequence[Pass], *, train: bool) -> Sequence[PassResult | UserError | ServerError]:
        """Run requests in one call. If it fails, each runs alone, so that the others succeed."""
        lengths = [len(datum.input_ids) for each in passes for datum in each.batch.data]
        run = functools.partial(run_passes, self.group, self._names, passes, train=train)
        done = self._attempt(lambda: self._pass_memory[train].run(lengths, run))
        if isinstance(done, UserError | ServerError):
            return [done] if len(passes) == 1 else [self._run_call([each], train=train)[0] for each in passes]
        if train:
            for each in passes:
                self._slot(each.batch.model_id).pending = True
        return done

    def _attempt(self, work: Callable[[], _R]) -> _R | UserError | ServerError:
        """Return the result of a function, or its error if it concerns one request only."""
        try:
            with self._errors():
                return work()
        except BackendLostError:
            raise
        except (UserError, ServerError) as error:
            return error

    # ---- optimizer

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        slot, settings = self._slot(model_id), step_settings(params)
        with self._errors():
            self._select(slot.name)
            if not slot.pending:
                # A batch without weight has the gradient 0.
                sample = {"input_ids": torch.zeros(1, dtype=torch.int64)}
                self.group.forward_backward([sample], no_loss, no_weight, normalization="sum")
            stats = self.group.optimizer_step(settings)
            slot.pending = False
        if not stats.update_successful:
            raise UserError(
                f"optim_step: the gradient is not finite (its norm is {stats.grad_norm}): it was discarded, and the model is unchanged. Check "
                "the weights, advantages and log-probs of the data"
            )
        return {"grad_norm:mean": stats.grad_norm}

    # ---- checkpoints

    def save(self, model_id: str, folder: Path) -> None:
        self._save(model_id, folder, with_optim=True)

    def save_for_sampler(self, model_id: str, folder: Path) -> None:
        self._save(model_id, folder, with_optim=False)

    def save_external(self, model_id: str, folder: Path) -> None:
        source = folder.with_name(f"{folder.name}.peft")
        self._save(model_id, source, with_optim=False)
        with self._errors():
            export_adapter(source, folder, self._base.name)

    def _save(self, model_id: str, folder: Path, *, with_optim: bool) -> None:
        slot = self._slot(model_id)
        about = {
            "base_model": self._base.name,
            "fingerprint": self._base.fingerprint,
            "adapter": dataclasses.asdict(slot.adapter),
        }
        with self._errors():
            self.group.adapters.save(slot.name, folder.absolute(), with_optim=with_optim, about={_ABOUT: about})
            # The process of rank 0 writes, which may be on another node.
            if not is_complete(folder):
                raise ServerError(
                    f"{folder} was written by rank 0, but is not visible to the server: put --root on a file system that all nodes share"
                )

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> AdapterSpec:
        self._require()
        with self._errors():
            adapter = self._described(folder)
            self._config.lora(adapter)
            # A new slot, so that a checkpoint that is refused leaves the model as it is.
            path, before = folder.absolute(), self.models.get(model_id)
            slot = self._admit(
                adapter, lambda name: self.group.adapters.load(name, path, with_optim=with_optimizer), before
            )
            self.models[model_id] = slot
            if before is not None:
                self._remove(before)
        return adapter

    def _described(self, folder: Path) -> AdapterSpec:
        """Return the description of the adapter in a checkpoint.

        Raises:
            ValueError: the checkpoint is damaged, or of another base model.
        """
        about = verify(folder).about.get(_ABOUT)
        if about is None:
            raise ValueError(f"{folder} was not saved by this server: load a checkpoint that save_state has written")
        if about["fingerprint"] != self._base.fingerprint:
            raise ValueError(
                f"the checkpoint is of the base model {about['base_model']!r}, and this server trains {self._base.name!r} with other "
                "weights: load it on a server of its base model"
            )
        return AdapterSpec(**about["adapter"])

    # ---- faults

    def healthy(self) -> bool:
        return not self._closed and self._lost is None and self._executor.lost is None

    def restart(self) -> None:
        with self._errors():
            self.group.restart()
            self._begin()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.group.destroy()
            self._executor.close()

    def _require(self) -> None:
        if not self.healthy():
            raise lost_error(self._lost or self._executor.lost or RuntimeError("the backend was closed"))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the engine as those of the protocol, and note that the ranks are lost."""
        try:
            with protocol_errors(self._executor):
                yield
        except BackendLostError as error:
            self._lost = self._lost or error.__cause__ or error
            raise


def create(model: str, backend: str, config: Mapping[str, Any]) -> EngineBackend:
    """Start a backend: a :class:`~areal.tinker.backends.backend.TrainingFactory`."""
    return EngineBackend(model, backend, EngineBackendConfig.parse(config))
