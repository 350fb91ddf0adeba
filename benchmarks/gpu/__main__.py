"""Compares training steps of Qwen3 shapes on one GPU with plain transformers and the same attention kernel.

python -m benchmarks.gpu --shapes 0.6B 1.7B --tokens 4096 16384
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from areal.utils import platform
from areal.utils.functional.logprobs import head_outputs
from benchmarks.gpu.device import idle_share, matmul_rate, peak_bytes, seconds
from benchmarks.gpu.rows import ours, plain
from benchmarks.shapes import SHAPES, Shape

Row = Callable[[], AbstractContextManager[Callable[[], object]]]


@dataclass(frozen=True)
class Settings:
    """Command-line options."""

    shapes: tuple[str, ...] = ("0.6B", "1.7B", "8B")
    """Names in :data:`benchmarks.shapes.SHAPES`."""
    tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Packed tokens in a step of one micro-batch."""
    sequence: int = 2048
    """Tokens of a sequence."""
    rounds: int = 5
    """Number of timed steps, after one warm-up step."""
    recompute: bool = False
    """Recompute layers in the backward (always on for 8B)."""
    compiled: bool = False
    """Add a row with compiled layers."""
    device: str = "cuda"
    """Device; `cpu` tries the command out."""
    output: Path = Path("runs/bench/gpu.json")
    """JSON file of all figures."""


def main(settings: Settings) -> None:
    """Run the benchmark."""
    device = torch.device(settings.device)
    if device.type != platform.accelerator():
        raise ValueError(f"device = {settings.device!r}: this machine computes on {platform.accelerator()!r}")
    unknown = set(settings.shapes) - set(SHAPES)
    if unknown:
        raise ValueError(f"shapes = {settings.shapes}: there are {sorted(SHAPES)}")
    platform.set_device(platform.current_device())
    rate = matmul_rate(device, torch.bfloat16, 8192 if device.type == "cuda" else 256)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: bf16 matmul {rate / 1e12:.3g} TFLOP/s", flush=True)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "matmul": rate, "steps": [], "head": []}
    for shape_name in settings.shapes:
        for tokens in settings.tokens:
            result["steps"] += steps(shape_name, tokens, settings, device, rate)
    result["head"] = head(SHAPES[settings.shapes[-1]], max(settings.tokens), device)
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    settings.output.write_text(json.dumps(result, indent=1))


def steps(name: str, tokens: int, settings: Settings, device: torch.device, rate: float) -> list[dict[str, Any]]:
    """Measure the rows of one shape and length, one after the other: two models do not fit in memory at once."""
    shape, recompute = SHAPES[name], settings.recompute or name == "8B"
    lengths = [min(settings.sequence, tokens - start) for start in range(0, tokens, settings.sequence)]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, shape.vocabulary, (n,), generator=generator) for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        path = shape.write(Path(folder))
        rows: dict[str, Row] = {
            "areal fsdp:d1": lambda: ours(path, sequences, recompute=recompute, compiled=False),
            "plain transformers": lambda: plain(path, sequences, device, recompute=recompute),
        }
        if settings.compiled:
            rows["areal fsdp:d1, compiled"] = lambda: ours(path, sequences, recompute=recompute, compiled=True)
        return [
            one(f"{name} {row}", make, shape.step_flop(lengths), tokens, settings, device, rate)
            for row, make in rows.items()
        ]


def one(
    name: str, make: Row, flop: float, tokens: int, settings: Settings, device: torch.device, rate: float
) -> dict[str, Any]:
    """Measure one row."""
    entry: dict[str, Any] = {"row": name, "tokens": tokens}
    try:
        with make() as step:
            taken = statistics.median(seconds(step, device, settings.rounds))
            entry |= {"seconds": taken, "mfu": flop / taken / rate, "peak_bytes": peak_bytes(step, device)}
            entry["idle"] = idle_share(step, device)
    except torch.OutOfMemoryError:
        entry["out_of_memory"] = True
    gc.collect()
    platform.empty_cache(device)
    print(
        "  ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in entry.items()
        ),
        flush=True,
    )
    return entry


def head(shape: Shape, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure the memory of log-probs and entropy with their backward: chunked, and from full logits."""
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, shape.vocabulary, (tokens,), device=device)

    def chunked() -> None:
        result = head_outputs(hidden, weight, targets, entropy=True)
        assert result.logprobs is not None
        assert result.entropy is not None
        (result.logprobs + result.entropy).sum().backward()

    def at_once() -> None:
        logprobs: Tensor = (hidden @ weight.t()).float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        (logprobs.gather(1, targets[:, None]).squeeze(1) + entropy).sum().backward()

    entries = []
    for name, work in (("chunked", chunked), ("all logits", at_once)):
        hidden.grad = weight.grad = None
        entry: dict[str, Any] = {"head": name, "tokens": tokens, "vocabulary": shape.vocabulary}
        try:
            entry |= {"peak_bytes": peak_bytes(work, device), "seconds": min(seconds(work, device, 2))}
        except torch.OutOfMemoryError:
            entry["out_of_memory"] = True
        print("  ".join(f"{key} {value}" for key, value in entry.items()), flush=True)
        entries.append(entry)
    return entries


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
