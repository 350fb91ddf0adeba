"""One training step beside plain loops, on the same data and weights, interleaved in one run.

Prints tokens per CPU-second, the share of the GEMM rate measured in the same run, and ratios to the hand-written packed loop. Every row
states the loss and the gradient norm of its first step; a row that differs from the float64 reference is marked wrong.

    python benchmarks/train_step.py --help
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from areal import FinetuneSpec, MicroBatchSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import Batch, TokenOutputs

LR = 1e-4


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> int:
    """Write a random Qwen3 to ``folder``; returns the parameters that multiply every token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n)


def make_lengths(n: int, tokens: int, seed: int = 0) -> list[int]:
    """``n`` ragged lengths that sum to about ``tokens``."""
    shares = torch.distributions.LogNormal(0.0, 0.6).sample((n,)).double()
    return [max(2, int(x)) for x in shares / shares.sum() * tokens]


# ---- the loops


def padded_loop(model: PreTrainedModel, sequences: list[Tensor], rows: int) -> Tensor:
    """Plain transformers: right padding, ``rows`` sequences a micro-batch."""
    total = sum(len(ids) - 1 for ids in sequences)
    loss = torch.zeros(())
    for start in range(0, len(sequences), rows):
        group = sequences[start : start + rows]
        ids = nn.utils.rnn.pad_sequence(group, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in group], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)[:, 1:]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        part = (
            F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum") / total
        )
        part.backward()
        loss += part.detach()
    return loss


def _per_sequence(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    lengths = kwargs["lengths"]
    outs = [
        F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        for a, b, c in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    return torch.cat(outs, 2).transpose(1, 2), None


AttentionInterface.register("bench_per_sequence", _per_sequence)


def packed_loop(model: PreTrainedModel, sequences: list[Tensor], chunk: int = 256) -> Tensor:
    """Hand-written: all sequences packed, attention per sequence, cross-entropy in recomputed chunks. The practical ceiling."""
    lengths = [len(ids) for ids in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    targets = torch.cat([torch.cat([ids[1:], torch.tensor([-100])]) for ids in sequences])
    hidden = model.model(
        input_ids=torch.cat(sequences)[None],
        position_ids=positions[None],
        attention_mask=None,
        use_cache=False,
        lengths=lengths,
    ).last_hidden_state[0]

    def head(h: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, model.lm_head.weight).float(), t, ignore_index=-100, reduction="sum")

    parts = [
        checkpoint(head, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    loss = torch.stack(parts).sum() / (targets != -100).sum()
    loss.backward()
    return loss.detach()


def nll(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Cross-entropy, summed over the micro-batch."""
    return -outputs.logprobs.sum()


# ---- measuring


def make_rows(folder: Path, sequences: list[Tensor], dtype: str) -> dict[str, Callable[[], tuple[float, float]]]:
    """Name -> one whole training step, returning loss and gradient norm."""
    batch = [{"input_ids": ids} for ids in sequences]
    engine = create_engine(
        TrainEngineConfig(
            path=str(folder),
            backend="fsdp:d1",
            dtype=dtype,
            optimizer=OptimizerConfig(lr=LR, gradient_clipping=1.0),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=1 << 20),
        )
    )
    engine.initialize(FinetuneSpec(total_train_steps=1000))

    def ours() -> tuple[float, float]:
        step = engine.train_batch(batch, nll)
        return step.loss, float(step.grad_norm or 0.0)

    def plain(attention: str, loop: Callable[[PreTrainedModel], Tensor]) -> Callable[[], tuple[float, float]]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)

        def step() -> tuple[float, float]:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = loop(model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item(), norm.item()

        return step

    return {
        "areal train_batch": ours,
        "hand-written packed loop": plain("bench_per_sequence", lambda m: packed_loop(m, sequences)),
        "transformers, padded, 8 a micro-batch": plain("sdpa", lambda m: padded_loop(m, sequences, 8)),
        "transformers, 1 a micro-batch": plain("sdpa", lambda m: padded_loop(m, sequences, 1)),
    }


def gemm_rate(dtype: torch.dtype, n: int = 1024) -> float:
    """FLOP per CPU-second of a square matrix product."""
    a, b = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        a @ b
        seconds.append(time.process_time() - start)
    return 2 * n**3 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=3243)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    lengths = make_lengths(args.sequences, args.tokens)
    sequences = [torch.randint(0, args.vocabulary, (n,)) for n in lengths]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        matrix = make_model(folder, args.hidden, args.layers, args.vocabulary)
        rows = make_rows(folder, sequences, args.dtype)
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        reference = padded_loop(exact, sequences, 1).item()
        first = {row: step() for row, step in rows.items()}
        seconds: dict[str, list[float]] = {row: [] for row in rows}
        rates = []
        for _ in range(args.rounds):
            rates.append(gemm_rate(getattr(torch, args.dtype)))
            for row, step in rows.items():
                start = time.process_time()
                step()
                seconds[row].append(time.process_time() - start)
    report(sequences, matrix, first, seconds, statistics.median(rates), reference, args)


def report(
    sequences: list[Tensor],
    matrix: int,
    first: dict[str, tuple[float, float]],
    seconds: dict[str, list[float]],
    rate: float,
    reference: float,
    args: argparse.Namespace,
) -> None:
    """Print the table; ratios are medians of the rounds' own ratios."""
    tokens = sum(map(len, sequences))
    bound = 2e-5 if args.dtype == "float32" else 5e-3
    base = seconds["hand-written packed loop"]
    table = []
    for row, times in seconds.items():
        ratios = [b / t for b, t in zip(base, times, strict=True)]
        speed = tokens / statistics.median(times)
        table.append(
            {
                "row": row,
                "tokens per CPU-second": round(speed),
                "share of GEMM rate": round(speed * 6 * matrix / rate, 3),
                "ratio": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "loss": first[row][0],
                "grad_norm": first[row][1],
                "right": abs(first[row][0] - reference) <= bound * abs(reference),
            }
        )
    print(f"{len(sequences)} sequences, {tokens} tokens, {args.dtype}; GEMM {rate / 1e9:.0f} GFLOP per CPU-second")
    for entry in table:
        mark = "" if entry["right"] else "  WRONG"
        print(
            f"{entry['row']:40s} {entry['tokens per CPU-second']:7d} tok/s  GEMM {entry['share of GEMM rate']:.2f}  "
            f"ratio {entry['ratio']:.3f} {entry['spread']}  loss {entry['loss']:.6f} norm {entry['grad_norm']:.5f}{mark}"
        )
    if args.output:
        args.output.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
