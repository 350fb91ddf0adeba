"""Engines in two processes behind one handle: the bits of the ranks themselves, in the caller's order, and their errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import Batch, FinetuneSpec, LoRAConfig, SaveLoadMeta, TokenOutputs
from areal.dispatch import WorkerGroup
from areal.dispatch.executor import RankObjects
from areal.dispatch.ray import RayWorkers
from areal.dispatch.shards import plan_shards
from areal.engine.registry import create_engine
from areal.tests.dispatch_ray import functions
from areal.tests.dispatch_ray.functions import run
from areal.tests.dist.dispatch.results import Counter, half_of_the_loss, same, untimed, weights_in
from areal.tests.grid.cases import as_input
from areal.tests.grid.models import VOCAB
from areal.tests.harness.tiny import config, global_batch, loss, weights_of
from areal.utils.remote_traceback import RemoteTraceback
from areal.weight_sync.disk import DiskTransport

SPEC = FinetuneSpec(total_train_steps=1000)


def on_the_ranks(rank_objects: RankObjects, handle: Any) -> tuple[list[Any], Any, dict[str, Tensor]]:
    """Train an engine as each rank of torchrun does, with its own shards."""
    settings, shards = handle.get()
    with create_engine(settings) as engine:
        engine.initialize(SPEC)
        steps = [untimed(engine.train_batch(shard, loss)) for shard in shards[:-1]]
        return steps, engine.forward_batch(shards[-1]), weights_of(engine)


def assert_outputs(actual: Any, expected: Any, *, exact: bool) -> None:
    """Compare outputs of a training pass with those of a forward. In JAX, two programs compute them."""
    if exact:
        assert same(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def loss_that_fails_on_rank_1(outputs: TokenOutputs, batch: Batch) -> Tensor:
    if os.environ["RANK"] == "1":
        raise ValueError("a bad loss")
    return loss(outputs, batch)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("backend", "coordinates"),
    [
        ("fsdp:d2", 2),
        pytest.param("megatron:t2", 1),
        pytest.param("jax:d2", 2),
    ],
)
def test_group_gives_the_bits_of_the_ranks(pair: RayWorkers, backend: str, coordinates: int, tmp_path: Path) -> None:
    settings, exact = config(backend), not backend.startswith("jax")
    if not exact:
        run(pair, functions.compile_once)
    batches = [global_batch(seed) for seed in range(3)]
    plans = [plan_shards(batch, settings.mb_spec, coordinates) for batch in batches]
    shards = [pair.put((settings, [plan.shards[rank % coordinates] for plan in plans])) for rank in range(2)]
    expected = run(pair, on_the_ranks, shards)
    with WorkerGroup(settings, pair) as group:
        group.initialize(SPEC)

        # Steps, with one object stored for each coordinate.
        before = pair.store.batches
        assert same([untimed(group.train_batch(batch, loss)) for batch in batches[:2]], expected[0][0])
        assert pair.store.batches == before + 2 * coordinates

        # Outputs in the caller's order and form.
        outputs = group.forward_batch(batches[2])
        assert same(outputs, plans[2].merge([expected[rank][1] for rank in range(coordinates)]))
        assert [len(row) for row in outputs] == [len(sample["input_ids"]) for sample in batches[2]]
        padded = group.forward_batch(as_input(batches[2], "padded"))
        for row, output in zip(padded, outputs, strict=True):
            assert torch.equal(row[: len(output)], output)
        assert same(weights_of(group), expected[0][2])
        # From the ranks to a folder, and through the driver.
        folders = [tmp_path / "ranks", tmp_path / "driver"]
        group.transport(lambda engine: DiskTransport(engine.control, folders[0])).send(group, 1)
        DiskTransport(group.control, folders[1]).send(group, 1)
        for folder in folders:
            assert same(weights_in(folder / "version-00000001"), expected[0][2])
        step = group.forward_backward(batches[2], loss, returns=("logprobs",))
        assert_outputs(step.outputs["logprobs"], outputs, exact=exact)
        group.zero_grad()

        # A loop of the caller's: micro-batches stay on the ranks.
        mbs = group.microbatches(batches[2])
        results = group.forward_backward_batch(mbs, half_of_the_loss)
        assert_outputs(mbs.restore(results), outputs, exact=exact)
        assert group.global_weight(mbs) > 0
        group.zero_grad()

        # A checkpoint, with state of the driver.
        counter = Counter(3)
        group.save(SaveLoadMeta(tmp_path / "step", weight_format="dcp", stateful={"counter": counter}))
        after = untimed(group.train_batch(batches[2], loss))
        counter.count = 0
        group.load(SaveLoadMeta(tmp_path / "step", weight_format="dcp", stateful={"counter": counter}))
        assert counter.count == 3
        assert same(untimed(group.train_batch(batches[2], loss)), after)

        # A wrong batch is refused in the driver, which names the sample of the caller's batch and stores nothing.
        before = pair.store.batches
        wrong = [dict(sample) for sample in batches[0]]
        wrong[7]["input_ids"] = torch.full_like(wrong[7]["input_ids"], VOCAB)
        with pytest.raises(ValueError, match=rf"^input_ids of sample 7 at position 0 is {VOCAB}, outside"):
            group.train_batch(wrong, loss)
        assert pair.store.batches == before

        # An error of one rank, after which the group goes on.
        with pytest.raises(ValueError, match=r"rank 1.*a bad loss") as raised:
            group.train_batch(batches[0], loss_that_fails_on_rank_1)
        assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert "in loss_that_fails_on_rank_1" in str(raised.value.__cause__)
        assert group.run(lambda engine, shard: engine.dp_rank) == [0, coordinates - 1]


def epochs(group: WorkerGroup, samples: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Score samples, and train on mini-batches of them in two epochs. Returns all results."""
    logprobs, entropy = (group.forward_batch(samples, outputs=(name,)) for name in ("logprobs", "entropy"))
    samples = [
        sample | {"old_logprobs": a, "entropy": b, "step": torch.tensor(3.0)}
        for sample, a, b in zip(samples, logprobs, entropy, strict=True)
    ]
    samples = group.put(samples)
    steps = [untimed(group.train_batch(samples[first::2], loss)) for first in (0, 1, 1, 0)]
    mbs = group.microbatches(samples[1:])
    results = mbs.restore(group.forward_backward_batch(mbs, half_of_the_loss))
    group.zero_grad()
    shards = group.map(lambda engine, shard: [{**sample} for sample in shard], samples)
    return logprobs, entropy, steps, results, shards, untimed(group.eval_batch(samples, loss)), weights_of(group)


@pytest.mark.timeout(240)
def test_samples_that_were_put_give_the_bits_of_plain_ones(pair: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = global_batch()
    with (
        WorkerGroup(config("fsdp:d2"), pair, name="stored") as stored,
        WorkerGroup(config("fsdp:d2"), pair, name="plain") as plain,
    ):
        stored.initialize(SPEC)
        plain.initialize(SPEC)
        before = pair.store.batches
        samples = stored.put(batch)
        actual = epochs(stored, samples)
        # One piece of the batch, and one of the key that no rank has computed.
        assert pair.store.batches == before + 2
        monkeypatch.setattr(plain, "put", lambda samples: samples)
        assert same(actual, epochs(plain, batch))
        # A group of other processes' samples, which this one has put.
        assert same(plain.forward_batch(samples), plain.forward_batch(batch))


@pytest.mark.timeout(240)
def test_adapters_and_reference(pair: RayWorkers) -> None:
    """Two groups share the processes: one with adapters, and one with the weights that these are trained on."""
    with (
        WorkerGroup(config("fsdp:d2", lora=LoRAConfig(rank=2)), pair, name="policy") as group,
        WorkerGroup(config("fsdp:d2", optimizer=None), pair, name="base") as base,
    ):
        group.initialize(SPEC)
        base.initialize(SPEC)
        group.adapters.add("second", seed=3)
        group.adapters.select("second")
        group.train_batch(global_batch(), loss)
        assert group.adapters.selected == "second"
        plain = base.forward_batch(global_batch(1))
        with pytest.raises(KeyError), group.reference():  # noqa: PT012
            assert same(group.forward_batch(global_batch(1)), plain)
            raise KeyError("inside")
        # The context was left on both ranks, after the error too.
        assert not same(group.forward_batch(global_batch(1)), plain)
        names = [name for name, _ in group.adapters.named_tensors()]
        assert names
        assert all("lora" in name for name in names)


@pytest.mark.timeout(240)
def test_profile_gives_the_folder_of_each_rank(pair: RayWorkers, tmp_path: Path) -> None:
    with WorkerGroup(config("fsdp:d2"), pair) as group:
        group.initialize(SPEC)
        with group.profile(tmp_path / "one", ranks=[1]) as folders:
            assert folders == {1: tmp_path / "one"}
            # One rank cannot enter a second profile. The other one leaves it.
            with pytest.raises(RuntimeError, match=r"rank 1: profile\(\) where"), group.profile(tmp_path / "nested"):
                pass
            group.train_batch(global_batch(), loss)
        with group.profile(tmp_path / "all") as folders:
            group.train_batch(global_batch(), loss)
        assert folders == dict.fromkeys(range(2), tmp_path / "all")
        names = {path.name for path in folders[0].glob("trace-*")}
        assert names == {f"trace-rank{rank}.json.gz" for rank in folders}
