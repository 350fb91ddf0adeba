"""Runs of verl's SFT trainer as a user starts it: data, models and the command."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from areal.api import ParallelDims

ROOT = Path(__file__).parents[3]
WORDS = [f"w{i}" for i in range(120)]
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def write_model(folder: Path, *, experts: bool = False, critic: bool = False) -> Path:
    """Write a random Qwen3 of two layers, or a critic with its classes, with a tokenizer of words."""
    torch.manual_seed(0)
    if experts:
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))
    elif critic:
        model = Qwen3ForTokenClassification(Qwen3Config(**SIZES, num_labels=1, classifier_dropout=0.0))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(folder: Path, n: int) -> Path:
    """Write chats of two turns of different lengths."""
    chooser = random.Random(0)

    def text() -> str:
        return " ".join(chooser.choice(WORDS) for _ in range(chooser.randint(1, 15)))

    rows = [
        {"messages": [{"role": role, "content": text()} for role in ("user", "assistant", "user", "assistant")]}
        for _ in range(n)
    ]
    path = folder / f"chats-{n}.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


@dataclass(frozen=True)
class Curve:
    """What verl logged, by step."""

    loss: list[float]
    grad_norm: list[float]
    lr: list[float]
    validation: list[float]


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a process of verl on a CPU."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "areal.tests.verl.cpu_platform",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JAX_PLATFORMS": "cpu",
        **more,
    }


def train(
    folder: Path, model: Path, engine: str, *overrides: str, steps: int, data: Path, check: bool = True
) -> Curve | str:
    """Run verl's unmodified SFT trainer under torchrun.

    Args:
        folder: for checkpoints and metrics.
        model: directory of a model.
        engine: layout of this library, or ``"verl"`` for verl's own engine on one rank.
        overrides: of verl's configuration.
        steps: length of the run.
        data: chats.
        check: raise if the run fails. Otherwise return its output.
    """
    own = engine == "verl"
    ranks = 1 if own else ParallelDims.parse(engine).world_size
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    options = (
        [
            "engine.strategy=fsdp2",
            "engine.model_dtype=fp32",
            "engine.use_torch_compile=false",
            "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        ]
        if own
        else [
            "engine=areal",
            f"engine.backend={engine}",
            "engine.dtype=float32",
            "hydra.searchpath=[pkg://areal.integrations.verl.yaml]",
        ]
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "verl.trainer.sft_trainer"),
        *options,
        f"model.path={model}",
        "+model.override_config.attn_implementation=sdpa",
        "model.use_remove_padding=true",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.val_max_samples=16",
        *(
            "data.train_batch_size=8",
            "data.max_token_len_per_gpu=128",
            "data.num_workers=0",
            "data.ignore_input_ids_mismatch=true",
        ),
        *("optim.lr=1e-3", "optim.lr_warmup_steps=5", "optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.1"),
        *("trainer.device=cpu", "trainer.logger=[file]", "trainer.project_name=p", "trainer.experiment_name=e"),
        *(
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=100",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
        ),
        f"trainer.test_freq={max(1, steps // 2)}",
        *overrides,
    ]
    device = {"VERL_ENGINE_DEVICE": "cuda"} if own else {}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(VERL_FILE_LOGGER_PATH=str(log), **device),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    output = done.stdout + done.stderr
    if not check:
        return output
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{output[-6000:]}")
    return read_curve(log)


def read_curve(log: Path) -> Curve:
    """Read the metrics that verl has written."""
    entries = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    train = [entry for entry in entries if "train/loss" in entry]
    return Curve(
        [entry["train/loss"] for entry in train],
        [entry["train/grad_norm"] for entry in train],
        [entry["train/lr"] for entry in train],
        [entry["val/loss"] for entry in entries if "val/loss" in entry],
    )
