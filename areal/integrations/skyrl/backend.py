"""SkyRL's backend interface on the training and sampling backends of this library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cloudpathlib import AnyPath
from skyrl.backends.backend import AbstractBackend
from skyrl.tinker import types
from skyrl.utils.log import logger
from skyrl.utils.storage import download_and_unpack, pack_and_upload

from areal.integrations.options import check_options
from areal.integrations.skyrl.config import ArealBackendConfig
from areal.integrations.skyrl.requests import pass_output, pass_requests, sample_output, sample_requests
from areal.tinker.backends.backend_registry import create_backends
from areal.tinker.direct.sampler import DirectSampler
from areal.tinker.direct.trainer import DirectTrainer

Responses = dict[str, types.ForwardBackwardOutput | types.ErrorResponse]


class ArealBackend(AbstractBackend):
    """Implements SkyRL's ``AbstractBackend``. Each model is an adapter, and a request that is refused fails alone.

    Args:
        base_model: directory or hub name.
        config: settings.

    Attributes:
        metrics: SkyRL's times of compilation, of which there are none.
        trainer: runs what trains.
        sampler: samples, from archives of snapshots; ``None`` without a sampler.

    Raises:
        ValueError: the model, the layout or a setting is refused.
    """

    def __init__(self, base_model: str, config: ArealBackendConfig) -> None:
        self.config, self.metrics = config, types.EngineMetrics()
        training, sampling = create_backends(base_model, **config.model_dump())
        self.trainer = DirectTrainer(training)
        self.sampler: DirectSampler | None = None
        if sampling is not None:
            self.sampler = DirectSampler(sampling, lambda path: download_and_unpack(AnyPath(path)))

    def close(self) -> None:
        """Release everything. SkyRL ends the process instead."""
        self.trainer.close()
        if self.sampler is not None:
            self.sampler.close()

    # ---- models

    def has_model(self, model_id: str) -> bool:
        return model_id in self.trainer.models

    def create_model(self, model_id: str, lora_config: types.LoraConfig, model_role: str = "policy") -> None:
        way_out = "leave it out, or start SkyRL with a backend that has the role"
        check_options({"model_role": (model_role, ["policy"])}, "backend = 'areal'", way_out)
        adapter = self.trainer.create_model(model_id, lora_config.model_dump())
        logger.info(f"Created model {model_id} with {adapter}")

    def delete_model(self, model_id: str) -> None:
        self.trainer.delete_model(model_id)
        if self.sampler is not None:
            self.sampler.release(model_id)
        logger.info(f"Deleted model {model_id}")

    # ---- training

    def forward_backward(self, prepared_batch: types.PreparedModelPassBatch) -> Responses:
        outputs = self.trainer.forward_backward(pass_requests(prepared_batch))
        return {request_id: pass_output(output) for request_id, output in outputs.items()}

    def forward(self, prepared_batch: types.PreparedModelPassBatch) -> Responses:
        outputs = self.trainer.forward(pass_requests(prepared_batch))
        return {request_id: pass_output(output) for request_id, output in outputs.items()}

    def optim_step(self, model_id: str, request_data: types.OptimStepInput) -> types.OptimStepOutput:
        metrics = self.trainer.optim_step(model_id, request_data.adam_params.model_dump())
        return types.OptimStepOutput(metrics=dict(metrics))

    # ---- sampling

    def sample(self, prepared_batch: types.PreparedSampleBatch) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        if self.sampler is None:
            raise ValueError(
                "sampler = None in --backend-config: samples are not served; set it to 'vllm' with the url of a server, or to 'local'"
            )
        outputs = self.sampler.sample(sample_requests(prepared_batch))
        return {request_id: sample_output(output) for request_id, output in outputs.items()}

    # ---- checkpoints

    def save_checkpoint(self, output_path: str | Path, model_id: str) -> None:
        _pack(self.trainer.save, output_path, model_id)

    def load_checkpoint(self, checkpoint_path: str | Path, model_id: str) -> None:
        with download_and_unpack(AnyPath(checkpoint_path)) as folder:
            self.trainer.load(model_id, folder)

    def save_sampler_checkpoint(self, output_path: str | Path, model_id: str, persist: bool = True) -> None:
        # Samplers read the archive, so that it is written in any case.
        _pack(self.trainer.save_for_sampler, output_path, model_id)


def _pack(write: Callable[[str, Path], None], output_path: str | Path, model_id: str) -> None:
    """Write a model to an archive, with its files at the top as readers of peft's format expect them."""
    with pack_and_upload(AnyPath(output_path)) as folder:
        folder.rmdir()  # empty: the model is written to a new one
        write(model_id, folder)
