"""A group in this process gives the bits of the engine alone, for every member of the interface."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import (
    Batch,
    FinetuneSpec,
    LoRAConfig,
    MicroBatchSpec,
    ParallelDims,
    SaveLoadMeta,
    StepSettings,
    TokenOutputs,
    TopK,
    TrainEngine,
)
from areal.dispatch import InProcess, WorkerGroup
from areal.dispatch.executor import Reply
from areal.dispatch.layouts import tensor_parallel_over_nodes
from areal.engine.registry import create_engine
from areal.tests.dist.dispatch.results import Counter, half_of_the_loss, same, untimed, weights_in
from areal.tests.grid.cases import as_input
from areal.tests.harness.tiny import (
    BATCH_VERBS,
    config,
    global_batch,
    gradients_of,
    loss,
    started,
    weights_of,
)
from areal.weight_sync.disk import DiskTransport

BACKENDS = ["fsdp:d1", "megatron:d1"]


@contextmanager
def group(backend: str, **changes: Any) -> Iterator[WorkerGroup]:
    with WorkerGroup(config(backend, **changes)) as made:
        made.initialize(FinetuneSpec(total_train_steps=1000))
        yield made


PAIRS = MicroBatchSpec(samples_per_mb=2)


def evaluated(engine: TrainEngine) -> Any:
    mbs = engine.microbatches(global_batch(4))
    with engine.evaluating():
        return engine.forward_backward_batch(mbs, half_of_the_loss, forward_only=True)


def in_the_first_layer(name: str) -> bool:
    return "layers.0." in name


CALLS: dict[str, Callable[[TrainEngine], Any]] = {
    "train_batch": lambda engine: untimed(engine.train_batch(global_batch(), loss)),
    "forward_backward": lambda engine: untimed(engine.forward_backward(global_batch(1), loss, loss_weight=0.5)),
    "returns": lambda engine: untimed(engine.forward_backward(global_batch(5), loss, returns=("logprobs", TopK(3)))),
    "named_gradients": gradients_of,
    "eval_batch": lambda engine: untimed(engine.eval_batch(global_batch(2), loss)),
    "optimizer_step": lambda engine: engine.optimizer_step(StepSettings(lr=0.25, betas=(0.5, 0.5))),
    "forward_batch": lambda engine: engine.forward_batch(global_batch(3)),
    "padded": lambda engine: engine.forward_batch(
        as_input(global_batch(3), "padded"), outputs=("logprobs", "entropy", TopK(3))
    ),
    "memory": lambda engine: (engine.memory(), engine.start(TrainEngine.memory).result()),
    "set_lr": lambda engine: (engine.set_lr(0.125), engine.lr)[1],
    "custom": lambda engine: (
        mbs := engine.microbatches(global_batch(4)),
        engine.global_weight(mbs),
        results := engine.forward_backward_batch(mbs, half_of_the_loss),
        mbs.restore(results),
        len(mbs),
        mbs.n_tokens,
    )[1:],
    "mb_spec": lambda engine: (
        len(engine.microbatches(global_batch(4), mb_spec=PAIRS)),
        engine.forward_batch(global_batch(4), mb_spec=PAIRS),
        untimed(engine.eval_batch(global_batch(4), loss, mb_spec=PAIRS)),
    ),
    "evaluating": evaluated,
    "zero_grad": lambda engine: engine.zero_grad(),
    "named_tensors": weights_of,
    "selected": lambda engine: dict(engine.named_tensors(dtype=torch.bfloat16, select=in_the_first_layer)),
    "offload": lambda engine: (engine.offload(), untimed(engine.train_batch(global_batch(), loss)))[1],
}


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_verb_gives_the_bits_of_the_engine(backend: str) -> None:
    with started(backend) as engine, group(backend) as handle:
        for name, call in CALLS.items():
            assert same(call(handle), call(engine)), name


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_those_of_the_engine(backend: str) -> None:
    """The same type and text, and the group goes on after them."""

    def raised(call: Callable[[], Any]) -> tuple[type, str]:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        return type(caught.value), str(caught.value)

    def explode(outputs: TokenOutputs, batch: Batch) -> Tensor:
        raise KeyError("advantages")

    with started(backend) as engine, group(backend) as handle:
        for verb in BATCH_VERBS:
            assert raised(lambda verb=verb: verb(handle, 7)) == raised(lambda verb=verb: verb(engine, 7))
            assert raised(lambda verb=verb: verb(handle, [])) == raised(lambda verb=verb: verb(engine, []))
        for call in (
            lambda it: it.train_batch(global_batch(), explode),
            lambda it: it.optimizer_step(),
            lambda it: it.adapters,
            lambda it: list(it.named_gradients()),
            lambda it: it.load(SaveLoadMeta("/nowhere", weight_format="dcp")),
        ):
            assert raised(lambda call=call: call(handle)) == raised(lambda call=call: call(engine))
        assert handle.train_batch(global_batch(), loss).update_successful


@pytest.mark.world(1)
def test_driver_sees_one_data_parallel_shard() -> None:
    with group("fsdp:d1") as handle:
        assert (handle.dp_rank, handle.dp_size, handle.is_main) == (0, 1, True)
        x = torch.arange(3.0)
        assert torch.equal(handle.global_sum(x), x)
        with pytest.raises(RuntimeError, match="global_sum"):
            handle.dp_group  # noqa: B018
        handle.set_version(7)
        assert handle.version == 7
        assert handle.run(lambda engine, shard: (engine.version, shard)) == [(7, None)]
        assert handle.run(lambda engine, shard: len(shard), global_batch()) == [len(global_batch())]
        lengths = [len(sample["input_ids"]) for sample in global_batch()]
        assert (
            handle.map(lambda engine, shard: [len(sample["input_ids"]) for sample in shard], global_batch()) == lengths
        )


@pytest.mark.world(1)
def test_call_before_initialize_or_after_destroy_raises() -> None:
    handle = WorkerGroup(config("fsdp:d1"))
    with pytest.raises(RuntimeError, match=r"call initialize\(FinetuneSpec"):
        handle.train_batch(global_batch(), loss)
    with pytest.raises(RuntimeError, match="never initialized"):
        handle.restart()
    handle.initialize(FinetuneSpec(total_train_steps=10))
    handle.destroy()
    handle.destroy()
    with pytest.raises(RuntimeError, match=r"call initialize\(FinetuneSpec"):
        handle.forward_batch(global_batch())


def test_layout_of_another_size_than_the_executor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fsdp:d2' has 2 ranks, and the executor 1 processes"):
        WorkerGroup(config("fsdp:d2", path="nowhere"))


@pytest.mark.world(1)
@pytest.mark.parametrize("first", ["engine", "group"])
def test_checkpoint_of_one_is_loaded_by_the_other(first: str, tmp_path: Path) -> None:
    """With state of the driver's objects, and the version."""
    with started("fsdp:d1") as engine, group("fsdp:d1") as handle:
        saver, loader = (engine, handle) if first == "engine" else (handle, engine)
        saver.train_batch(global_batch(), loss)
        saver.set_version(5)
        saver.save(SaveLoadMeta(tmp_path / "step", weight_format="dcp", stateful={"counter": Counter(3)}))
        counter = Counter(0)
        loader.load(SaveLoadMeta(tmp_path / "step", weight_format="dcp", stateful={"counter": counter}))
        assert (counter.count, loader.version) == (3, 5)
        assert same(
            untimed(loader.train_batch(global_batch(1), loss)), untimed(saver.train_batch(global_batch(1), loss))
        )


@pytest.mark.world(1)
def test_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    with group("fsdp:d1") as handle:
        handle.train_batch(global_batch(), loss)
        counter = Counter(1)
        handle.save(SaveLoadMeta(tmp_path / "step", weight_format="dcp", stateful={"counter": counter}))
        expected = untimed(handle.train_batch(global_batch(1), loss))
        counter.count = 9
        handle.restart()
        assert counter.count == 1
        assert same(untimed(handle.train_batch(global_batch(1), loss)), expected)


@pytest.mark.world(1)
def test_adapters_and_reference(tmp_path: Path) -> None:
    lora = {"lora": LoRAConfig(rank=2)}
    with started("fsdp:d1", **lora) as engine, group("fsdp:d1", **lora) as handle:
        for it in (engine, handle):
            it.train_batch(global_batch(), loss)
            it.adapters.add("second", seed=3)
            it.adapters.select("second")
            it.train_batch(global_batch(1), loss)
            it.adapters.save("second", tmp_path / type(it).__name__)
        assert handle.adapters.names == engine.adapters.names
        assert handle.adapters.selected == "second"
        assert same(list(handle.adapters.named_tensors()), list(engine.adapters.named_tensors()))
        written = json.loads((tmp_path / "FSDPEngine" / "adapter_config.json").read_text())
        assert handle.adapters.peft_config() == engine.adapters.peft_config() == written

        def fail_inside() -> None:
            with handle.reference():
                assert same(handle.forward_batch(global_batch()), reference_of(engine))
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            fail_inside()
        # The context was left on the ranks, after the error too.
        assert same(handle.forward_batch(global_batch()), engine.forward_batch(global_batch()))


def reference_of(engine: TrainEngine) -> Any:
    with engine.reference():
        return engine.forward_batch(global_batch())


@pytest.mark.world(1)
def test_stream_that_is_left_early_is_closed() -> None:
    with group("fsdp:d1") as handle:
        stream = handle.named_tensors()
        next(stream)
        del stream
        assert handle.train_batch(global_batch(), loss).update_successful
        assert len(weights_of(handle)) > 1


@pytest.mark.world(1)
def test_futures() -> None:
    with started("fsdp:d1") as engine, group("fsdp:d1") as handle:
        step = handle.start(TrainEngine.train_batch, global_batch(), loss)
        outputs = handle.start(TrainEngine.forward_batch, global_batch(1))
        assert outputs.done()
        assert same(untimed(step.result()), untimed(engine.train_batch(global_batch(), loss)))
        assert same(outputs.result(), engine.forward_batch(global_batch(1)))
        # Methods of the group itself, too.
        bound = handle.start(handle.forward_batch, global_batch(1), outputs=("entropy",))
        assert same(bound.result(), engine.forward_batch(global_batch(1), outputs=("entropy",)))
        with pytest.raises(ValueError, match="no future"):
            handle.start(TrainEngine.named_tensors)
        with pytest.raises(ValueError, match="pass a method of TrainEngine"):
            handle.start(TrainEngine.lr)  # type: ignore[arg-type]  # a property
        with pytest.raises(ValueError, match="verb = untimed: pass a method of TrainEngine"):
            handle.start(untimed)
        with pytest.raises(RuntimeError, match=r"already initialized.*name that is not 'engine'"):
            WorkerGroup(config("fsdp:d1"), handle._executor).initialize(FinetuneSpec(total_train_steps=10))


@pytest.mark.world(1)
def test_microbatches_are_dropped_with_the_last_reference() -> None:
    with group("fsdp:d1") as handle:
        mbs = handle.microbatches(global_batch())
        kept = lambda: [key for key in handle._executor._objects.by_name if "microbatches" in key]  # noqa: E731
        assert len(kept()) == 1
        with pytest.raises(ValueError, match="what microbatches"):
            handle.global_weight(create_engine_mbs())
        del mbs
        handle.zero_grad()
        assert not kept()


def create_engine_mbs() -> Any:
    with create_engine(config("fsdp:d1")) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=10))
        return engine.microbatches(global_batch())


@pytest.mark.world(1)
def test_profile_of_named_ranks(tmp_path: Path) -> None:
    with group("fsdp:d1") as handle:
        with handle.profile(tmp_path / "all", ranks=[0]) as folders:
            handle.train_batch(global_batch(), loss)
        assert folders == {0: tmp_path / "all"}
        assert (tmp_path / "all" / "trace-rank0.json.gz").exists()
        with handle.profile(tmp_path / "none", ranks=[]) as folders:
            handle.train_batch(global_batch(), loss)
        assert folders == {}
        assert not (tmp_path / "none").exists()
        with pytest.raises(ValueError, match="there is no rank 3"), handle.profile(tmp_path, ranks=[3]):
            pass


class OtherDisk(InProcess):
    """A process on another host, which does not see the driver's files."""

    def start(self, what: str, work: Any, arguments: Any) -> Any:
        if what != "check_shared":
            return super().start(what, work, arguments)
        future: Future[list[Reply]] = Future()
        future.set_result([Reply((False, "node-2"))])
        return future


@pytest.mark.world(1)
def test_folder_that_is_not_shared_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with WorkerGroup(config("fsdp:d1"), OtherDisk()) as handle:
        handle.initialize(FinetuneSpec(total_train_steps=10))
        with pytest.raises(ValueError, match=r"another folder for the driver on .* than for rank 0 on node-2"):
            handle.save(SaveLoadMeta(tmp_path / "new" / "step", weight_format="dcp"))
        assert not list(tmp_path.iterdir())
        assert handle.train_batch(global_batch(), loss).update_successful
    with (
        WorkerGroup(config("fsdp:d1"), OtherDisk(), shared_folder=tmp_path) as handle,
        pytest.raises(ValueError, match="node-2"),
    ):
        handle.initialize(FinetuneSpec(total_train_steps=10))


class OtherDirectory(InProcess):
    """A process whose working directory is not that of the driver.

    Args:
        folder: working directory during calls.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def start(self, what: str, work: Any, arguments: Any) -> Any:
        with contextlib.chdir(self._folder):
            return super().start(what, work, arguments)


@pytest.mark.world(1)
def test_relative_paths_are_relative_to_the_directory_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, ranks = tmp_path / "driver", tmp_path / "ranks"
    driver.mkdir()
    ranks.mkdir()
    monkeypatch.chdir(driver)
    with WorkerGroup(config("fsdp:d1", lora=LoRAConfig(rank=2)), OtherDirectory(ranks)) as handle:
        handle.initialize(FinetuneSpec(total_train_steps=10))
        handle.set_version(7)
        meta = SaveLoadMeta("runs/step", weight_format="dcp", asynchronous=True)
        handle.save(meta)
        handle.wait_for_checkpoint()
        handle.adapters.save(handle.adapters.selected, "runs/adapter")
        assert sorted(path.name for path in (driver / "runs").iterdir()) == ["adapter", "step"]
        assert not list(ranks.iterdir())
        handle.adapters.load("second", "runs/adapter")
        handle.set_version(8)
        handle.load(meta)
        assert handle.version == 7
        # The driver may be in another directory by then.
        monkeypatch.chdir(tmp_path)
        handle.set_version(8)
        handle.restart()
        assert handle.version == 7


@pytest.mark.world(1)
def test_weights_are_sent_from_the_ranks(tmp_path: Path) -> None:
    with group("fsdp:d1") as handle, group("fsdp:d1") as other:
        transport = handle.transport(lambda engine: DiskTransport(engine.control, tmp_path / "weights"))
        handle.train_batch(global_batch(), loss)
        sent = transport.send(handle, 3)
        assert sent.version == 3
        assert sent.n_tensors == len(weights_of(handle))
        assert same(weights_in(tmp_path / "weights" / "version-00000003"), weights_of(handle))
        # Through the driver, which is a rank of its own.
        DiskTransport(handle.control, tmp_path / "driver").send(handle, 4)
        assert same(weights_in(tmp_path / "driver" / "version-00000004"), weights_of(handle))
        with pytest.raises(ValueError, match="pass that group"):
            transport.send(other, 4)
        transport.close()


@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [("d2t2", "aabb", []), ("d2t2", "abbb", [[0, 1]]), ("t4", "aabb", [[0, 1, 2, 3]]), ("d4", "abab", [])],
)
def test_tensor_parallel_groups_over_nodes_are_found(layout: str, nodes: str, expected: list[list[int]]) -> None:
    assert tensor_parallel_over_nodes(ParallelDims.parse(f"fsdp:{layout}"), tuple(nodes)) == expected
