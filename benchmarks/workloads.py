"""Training data: sequences, and the weight of each token in the loss.

The arrays are files under ``benchmarks/arrays``, so that they do not depend on a random generator;
``python -m benchmarks.workloads`` writes them again from their seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ARRAYS = Path(__file__).parent / "arrays"
VOCABULARY = 8192


@dataclass(frozen=True)
class Workload:
    """Sequences in groups; sequences of a group have the same prompt.

    The loss is ``sum(weight * -logprob) / trained_tokens``, where the weight of a sequence applies to the positions that predict one of its
    response tokens, and is 0 elsewhere.

    Attributes:
        name: name in the tables.
        input_ids: int64 ``[S_i]`` for each sequence, prompt and response.
        prompt_lengths: number of prompt tokens per sequence; at least 1, because the first token is never predicted.
        sequence_weights: weight of each response token of a sequence: its advantage, or 1.
        groups: index of each sequence's group, from 0, not decreasing.
        vocabulary: upper bound of token ids, exclusive.
        max_tokens_per_mb: token budget of a micro-batch.
    """

    name: str
    input_ids: tuple[Tensor, ...]
    prompt_lengths: tuple[int, ...]
    sequence_weights: tuple[float, ...]
    groups: tuple[int, ...]
    vocabulary: int
    max_tokens_per_mb: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(ids) for ids in self.input_ids]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences; a prompt counts once for each of its responses, padding never."""
        return sum(self.lengths)

    @property
    def trained_tokens(self) -> int:
        """Response tokens of all sequences, the divisor of the loss."""
        return sum(self.lengths) - sum(self.prompt_lengths)

    @cached_property
    def trained(self) -> list[Tensor]:
        """bool ``[S_i]`` for each sequence: True at ``t`` where token ``t + 1`` belongs to the response."""
        masks = []
        for length, prompt in zip(self.lengths, self.prompt_lengths, strict=True):
            mask = torch.zeros(length, dtype=torch.bool)
            mask[prompt - 1 : length - 1] = True
            masks.append(mask)
        return masks

    @cached_property
    def weights(self) -> list[Tensor]:
        """float32 ``[S_i]`` for each sequence: weight of the log-prob at ``t``, that of token ``t + 1``."""
        return [mask * weight for mask, weight in zip(self.trained, self.sequence_weights, strict=True)]

    def take(self, chosen: Sequence[int]) -> Workload:
        """Select sequences by index."""
        return replace(
            self,
            input_ids=tuple(self.input_ids[i] for i in chosen),
            prompt_lengths=tuple(self.prompt_lengths[i] for i in chosen),
            sequence_weights=tuple(self.sequence_weights[i] for i in chosen),
            groups=tuple(self.groups[i] for i in chosen),
        )

    def first_groups(self, n: int) -> Workload:
        """Select the first ``n`` groups.

        Raises:
            ValueError: the workload has fewer groups.
        """
        there = max(self.groups) + 1
        if not 1 <= n <= there:
            raise ValueError(f"prompts = {n}: the workload {self.name!r} has {there}; ask for 1 to {there}")
        return self.take([i for i, group in enumerate(self.groups) if group < n])

    def shard_indices(self, rank: int, ranks: int) -> list[int]:
        """Return the indices of the sequences that ``rank`` trains on, ascending.

        Each group, longest first, goes to the rank with the fewest tokens so far.
        """
        sizes: dict[int, int] = {}
        for group, length in zip(self.groups, self.lengths, strict=True):
            sizes[group] = sizes.get(group, 0) + length
        loads, owner = [0] * ranks, {}
        for group in sorted(sizes, key=lambda g: -sizes[g]):
            owner[group] = loads.index(min(loads))
            loads[owner[group]] += sizes[group]
        if min(loads) == 0:
            raise ValueError(f"ranks = {ranks}: the workload has {len(sizes)} groups; take at most as many ranks")
        return [i for i, group in enumerate(self.groups) if owner[group] == rank]

    def save(self, path: Path) -> None:
        """Write the arrays to an ``.npz`` file."""
        np.savez_compressed(
            path,
            input_ids=torch.cat(self.input_ids).numpy().astype(np.uint16),
            lengths=np.array(self.lengths, np.uint16),
            prompt_lengths=np.array(self.prompt_lengths, np.uint16),
            sequence_weights=np.array(self.sequence_weights, np.float32),
            groups=np.array(self.groups, np.uint16),
            vocabulary=np.uint32(self.vocabulary),
            max_tokens_per_mb=np.uint32(self.max_tokens_per_mb),
        )


def load(name: str) -> Workload:
    """Load a workload by name, or from an ``.npz`` file.

    Raises:
        ValueError: there is neither a workload nor a file of that name.
    """
    path = Path(name) if name.endswith(".npz") else ARRAYS / f"{name}.npz"
    if not path.exists():
        known = sorted(file.stem for file in ARRAYS.glob("*.npz"))
        raise ValueError(f"workload = {name!r}: choose {', '.join(known)}, or give the path of an .npz file")
    with np.load(path) as arrays:
        ids = torch.from_numpy(arrays["input_ids"].astype(np.int64))
        return Workload(
            name=path.stem,
            input_ids=ids.split(arrays["lengths"].tolist()),
            prompt_lengths=tuple(arrays["prompt_lengths"].tolist()),
            sequence_weights=tuple(arrays["sequence_weights"].tolist()),
            groups=tuple(arrays["groups"].tolist()),
            vocabulary=int(arrays["vocabulary"]),
            max_tokens_per_mb=int(arrays["max_tokens_per_mb"]),
        )


def ragged(sequences: int = 24, tokens: int = 3243, vocabulary: int = VOCABULARY, seed: int = 0) -> Workload:
    """Draw sequences of very different lengths, ``tokens`` in total. Every token is trained with weight 1."""
    random = np.random.RandomState(seed)  # numpy guarantees the stream of this generator
    sizes = random.lognormal(0.0, 0.6, sequences)
    lengths = np.maximum(2, (sizes / sizes.sum() * tokens).astype(int))
    lengths[lengths.argmax()] += tokens - lengths.sum()
    return Workload(
        name="ragged",
        input_ids=tuple(torch.from_numpy(random.randint(0, vocabulary, n).astype(np.int64)) for n in lengths),
        prompt_lengths=(1,) * sequences,
        sequence_weights=(1.0,) * sequences,
        groups=tuple(range(sequences)),
        vocabulary=vocabulary,
        max_tokens_per_mb=4096,
    )


def rl(
    prompts: int = 16,
    responses: int = 8,
    prompt_tokens: int = 512,
    median: int = 200,
    bounds: tuple[int, int] = (64, 1024),
    vocabulary: int = VOCABULARY,
    max_tokens_per_mb: int = 8192,
    seed: int = 0,
) -> Workload:
    """Draw responses of log-normal length (sigma 0.6) to common prompts, weighed by advantages normalised within each group."""
    random = np.random.RandomState(seed)
    ids, weights = [], []
    for _ in range(prompts):
        prompt = random.randint(0, vocabulary, prompt_tokens)
        lengths = np.clip(np.rint(random.lognormal(np.log(median), 0.6, responses)), *bounds).astype(int)
        rewards = random.standard_normal(responses)
        weights += ((rewards - rewards.mean()) / rewards.std()).astype(np.float32).tolist()
        ids += [torch.from_numpy(np.concatenate([prompt, random.randint(0, vocabulary, n)])) for n in lengths]
    return Workload(
        name="rl",
        input_ids=tuple(x.long() for x in ids),
        prompt_lengths=(prompt_tokens,) * len(ids),
        sequence_weights=tuple(weights),
        groups=tuple(i // responses for i in range(len(ids))),
        vocabulary=vocabulary,
        max_tokens_per_mb=max_tokens_per_mb,
    )


MAKERS: dict[str, Callable[[], Workload]] = {"ragged": ragged, "rl": rl}
"""Functions that create the stored workloads from their seeds."""

if __name__ == "__main__":
    for name, make in MAKERS.items():
        make().save(ARRAYS / f"{name}.npz")
