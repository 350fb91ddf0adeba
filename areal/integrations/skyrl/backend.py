"""SkyRL's backend interface on the training and sampling backends of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloudpathlib import AnyPath
from skyrl.backends.backend import AbstractBackend
from skyrl.tinker import types
from skyrl.utils.log import logger
from skyrl.utils.storage import download_and_unpack, pack_and_upload

from areal.integrations.skyrl.config import ArealBackendConfig
from areal.integrations.skyrl.model_pass import failed, pass_output, prepared_batch
from areal.integrations.skyrl.sampler import ModelSampler
from areal.tinker.backends.backend_registry import create_sampling_backend, create_training_backend, share_base_model
from areal.tinker.backends.errors import BackendLostError, UserError
from areal.tinker.backends.prepared import AdamParams, AdapterSpec, PassResult, PreparedBatch

PassOutputs = dict[str, types.ForwardBackwardOutput | types.ErrorResponse]


class ArealBackend(AbstractBackend):
    """Implements SkyRL's ``AbstractBackend``. Each model is an adapter, and a request that is refused fails alone.

    Args:
        base_model: directory or hub name.
        config: settings.

    Attributes:
        metrics: SkyRL's times of compilation, of which there are none.
        models: adapter of each model, by the id of the model.

    Raises:
        ValueError: the model, the layout or a setting is refused.
    """

    def __init__(self, base_model: str, config: ArealBackendConfig) -> None:
        self.config, self.metrics = config, types.EngineMetrics()
        self.models: dict[str, types.LoraConfig] = {}
        self._training = create_training_backend(base_model, config.backend, config.backend_config)
        self._sampler: ModelSampler | None = None
        if config.sampler is not None:
            sampling = create_sampling_backend(base_model, config.sampler, config.sampler_config)
            share_base_model(self._training, sampling)
            self._sampler = ModelSampler(sampling)

    def close(self) -> None:
        """Release everything. SkyRL ends the process instead."""
        self._training.close()
        if self._sampler is not None:
            self._sampler.close()

    # ---- models

    def has_model(self, model_id: str) -> bool:
        return model_id in self.models

    def create_model(self, model_id: str, lora_config: types.LoraConfig, model_role: str = "policy") -> None:
        if model_role != "policy":
            raise ValueError(
                f"model_role = {model_role!r}: this backend trains policies only; leave it out, or start SkyRL with a backend that has the role"
            )
        adapter = AdapterSpec(
            rank=lora_config.rank,
            alpha=lora_config.alpha,
            seed=lora_config.seed,
            attention=lora_config.train_attn,
            mlp=lora_config.train_mlp,
            head=lora_config.train_unembed,
        )
        with self._restarting():
            self._training.create_model(model_id, adapter)
        self.models[model_id] = lora_config
        logger.info(f"Created model {model_id} with {adapter}")

    def delete_model(self, model_id: str) -> None:
        with self._restarting():
            self._training.delete(model_id)
        del self.models[model_id]
        if self._sampler is not None:
            self._sampler.release(model_id)
        logger.info(f"Deleted model {model_id}")

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """Start the training backend again after the loss of its processes, without models."""
        try:
            yield
        except BackendLostError:
            self.models.clear()
            self._training.restart()
            raise

    # ---- training

    def forward_backward(self, prepared_batch: types.PreparedModelPassBatch) -> PassOutputs:
        return self._pass(prepared_batch, self._training.forward_backward)

    def forward(self, prepared_batch: types.PreparedModelPassBatch) -> PassOutputs:
        return self._pass(prepared_batch, self._training.forward)

    def _pass(
        self, batch: types.PreparedModelPassBatch, run: Callable[[Sequence[PreparedBatch]], Sequence[Any]]
    ) -> PassOutputs:
        """Run the requests of a batch, in their order, each of which fails alone."""
        losses, limits = self._training.losses(), self._training.limits()
        results: PassOutputs = {}
        valid: dict[str, PreparedBatch] = {}
        for request_id, _, start, end in batch.request_batch_slices:
            try:
                valid[request_id] = prepared_batch(batch, range(start, end), losses, limits)
            except UserError as error:
                results[request_id] = failed(error)
        with self._restarting():
            done = run(list(valid.values()))
        for (request_id, request), result in zip(valid.items(), done, strict=True):
            results[request_id] = pass_output(request, result) if isinstance(result, PassResult) else failed(result)
        return results

    def optim_step(self, model_id: str, request_data: types.OptimStepInput) -> types.OptimStepOutput:
        with self._restarting():
            metrics = self._training.optim_step(model_id, AdamParams(**request_data.adam_params.model_dump()))
        return types.OptimStepOutput(metrics=dict(metrics))

    # ---- sampling

    def sample(self, prepared_batch: types.PreparedSampleBatch) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        if self._sampler is None:
            raise ValueError(
                "sampler = None in --backend-config: samples are not served; set it to 'vllm' with the url of a server, or to 'local'"
            )
        return self._sampler.sample(prepared_batch)

    # ---- checkpoints

    def save_checkpoint(self, output_path: str | Path, model_id: str) -> None:
        self._save(self._training.save, output_path, model_id)

    def load_checkpoint(self, checkpoint_path: str | Path, model_id: str) -> None:
        with self._restarting(), download_and_unpack(AnyPath(checkpoint_path)) as folder:
            self._training.load(model_id, folder, with_optimizer=True)

    def save_sampler_checkpoint(self, output_path: str | Path, model_id: str, persist: bool = True) -> None:
        # Samplers read the archive, so that it is written in any case.
        self._save(self._training.save_for_sampler, output_path, model_id)

    def _save(self, write: Callable[[str, Path], None], output_path: str | Path, model_id: str) -> None:
        """Write a model to an archive, with its files at the top as readers of peft's format expect them."""
        with self._restarting(), pack_and_upload(AnyPath(output_path)) as folder:
            draft = folder / "adapter"
            write(model_id, draft)
            for file in draft.iterdir():
                file.rename(folder / file.name)
            draft.rmdir()
