"""Mistakes that would train on without an error: each is refused, or named once in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from areal.api import Batch, FinetuneSpec, MicroBatchSpec, OptimizerConfig, SaveLoadMeta, TokenOutputs
from areal.engine.registry import create_engine
from areal.tests.dist.faults.twins import raised
from areal.tests.grid.models import VOCAB
from areal.tests.harness.tiny import chosen, config, global_batch, layouts, local_batch, loss, started
from areal.tests.harness.world import locked, world

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


class _Messages(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yield the warnings of the library in this process, to which those inside are added."""
    messages: list[str] = []
    handler = _Messages(messages)
    logging.getLogger("areal").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("areal").removeHandler(handler)


def with_words(messages: list[str], words: str) -> list[str]:
    return [text for text in messages if words in text]


# ---- the data are not divided


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "fsdp:r2", "megatron:d2", "jax:d2"))
def test_one_batch_on_all_data_parallel_ranks_is_refused(backend: str) -> None:
    with started(backend) as engine:
        batch = global_batch()
        for verb in (engine.train_batch, engine.forward_backward, engine.eval_batch):
            with raised(ValueError, "all 2 data-parallel ranks passed the same batch", "engine.dp_rank", "'allow'"):
                verb(batch, loss)
        assert len(engine.forward_batch(batch)) == len(batch), "log-probs count nothing"
        n_tokens = engine.train_batch(local_batch(engine, batch), loss).n_tokens
        assert n_tokens == sum(len(sample["input_ids"]) for sample in batch)
        # Equal batches are a coincidence once the data were divided.
        assert engine.train_batch(batch[:1], loss).n_tokens == 2 * len(batch[0]["input_ids"])


@pytest.mark.world(2)
def test_one_batch_on_all_data_parallel_ranks_may_be_allowed() -> None:
    batch = global_batch()
    with started("fsdp:d2", mb_spec=MicroBatchSpec(equal_batches="allow")) as engine:
        assert engine.train_batch(batch, loss).n_tokens == 2 * sum(len(sample["input_ids"]) for sample in batch)
    with started("fsdp:d2") as engine:
        mine = batch if engine.dp_rank == 0 else []
        assert engine.train_batch(mine, loss).update_successful, "a rank without samples repeats none"


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_coordinates_are_known_before_the_engine_is_initialized(backend: str) -> None:
    engine = create_engine(config(backend))
    before = engine.dp_rank, engine.dp_size, engine.is_main
    engine.initialize(FinetuneSpec(total_train_steps=1))
    first = all(engine.mesh[axis].get_local_rank() == 0 for axis in ("pp", "cp", "tp"))
    assert before == (engine.mesh["dp"].get_local_rank(), engine.mesh["dp"].size(), first)
    engine.destroy()


# ---- the loss


def mean_loss(out: TokenOutputs, batch: Batch) -> Tensor:
    """Return a mean over the tokens of the micro-batch, as TRL's losses are."""
    return loss(out, batch) / len(out.logprobs)


@pytest.mark.parametrize("backend", [*layouts(1, 2, also=("fsdp:p2",)), *chosen("jax:d1")])
def test_loss_that_is_a_mean_is_named_once(backend: str) -> None:
    with started(backend) as engine, warned() as messages:
        batch = local_batch(engine, global_batch())
        for each in (loss, mean_loss, mean_loss):
            engine.train_batch(batch, each)
        # One rank speaks for all.
        assert sum(engine.control.gather(len(with_words(messages, "mean_loss returned")))) == 1
        assert not [text for text in with_words(messages, "returned") if "mean_loss" not in text]
        for text in with_words(messages, "mean_loss returned"):
            assert "probably a mean" in text
            assert "loss_weight_fn" in text


# ---- the model's context, and its other inputs


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1")])
def test_sequence_beyond_the_context_is_named_once(backend: str) -> None:
    with started(backend, mb_spec=MicroBatchSpec()) as engine, warned() as messages:
        positions = AutoConfig.from_pretrained(engine.config.path).max_position_embeddings
        for length in (positions, positions + 1, positions + 1):
            ids = torch.arange(length) % (VOCAB - 3) + 3
            # The longest sequence is on one data-parallel rank.
            samples = [{"input_ids": ids if engine.dp_rank == engine.dp_size - 1 else ids[:9]}]
            engine.forward_batch(samples)
        found = with_words(messages, "max_position_embeddings")
        assert len(found) == (world().rank == 0)
        assert all(f"{positions + 1} tokens, and the model was made for {positions}" in text for text in found)


@pytest.fixture
def vision_model(tmp_path: Path) -> Path:
    """Configuration of a tiny GOT-OCR 2 with its vision tower."""
    text = {**TINY, "model_type": "qwen2", "num_key_value_heads": 1}
    vision = {"hidden_size": 16, "output_channels": 8, "mlp_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 16, "window_size": 2, "global_attn_indexes": []}
    made = AutoConfig.for_model("got_ocr2", text_config=text, vision_config=vision, image_token_index=60)
    made.architectures = ["GotOcr2ForConditionalGeneration"]
    with locked(tmp_path / "model"):
        made.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.world(1, 2)
@pytest.mark.parametrize("engine", ["fsdp", "megatron", "jax"])
def test_model_that_takes_images_is_refused_by_name(engine: str, vision_model: Path) -> None:
    engine = create_engine(
        config(f"{engine}:d{world().size}", path=str(vision_model), init_from_scratch=True, mb_spec=MicroBatchSpec())
    )
    with raised(ValueError, "model_type = 'got_ocr2'"):
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.world(1, 2)
def test_model_that_takes_images_trains_on_text_alone_if_asked(vision_model: Path) -> None:
    fields = {"path": str(vision_model), "init_from_scratch": True, "mb_spec": MicroBatchSpec()}
    ids = torch.arange(9) + 3 + world().rank
    with started(f"fsdp:d{world().size}", fsdp={"text_only": True}, **fields) as engine:
        assert engine.train_batch([{"input_ids": ids}], loss_of_logprobs).update_successful
        with raised(ValueError, "the token 60, which stands for an image"):
            engine.train_batch([{"input_ids": torch.cat([ids, torch.tensor([60])])}], loss_of_logprobs)
        with raised(ValueError, "key 'pixel_values'", "text alone"):
            engine.train_batch([{"input_ids": ids, "pixel_values": torch.zeros(3, 28, 28)}], loss_of_logprobs)


def loss_of_logprobs(out: TokenOutputs, batch: Batch) -> Tensor:
    return -out.logprobs.sum()


# ---- a resumed run


@pytest.mark.parametrize("backend", [*layouts(1), *chosen("jax:d1")])
def test_settings_that_changed_before_a_resume_take_effect_and_are_named(backend: str, tmp_path: Path) -> None:
    with started(backend, optimizer=OptimizerConfig(lr=1e-2)) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
    for lr, names in ((1e-2, []), (1e-3, ["lr = 0.001 (saved: 0.01)"])):
        with started(backend, optimizer=OptimizerConfig(lr=lr)) as engine, warned() as messages:
            engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
            assert [text.split("effect: ")[1] for text in with_words(messages, "take effect")] == names
            assert engine.train_batch(local_batch(engine, global_batch()), loss).lr == lr
