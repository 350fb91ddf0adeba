"""Memory: allocations of a step, synchronizations with the device, and offload of weights, gradients and optimizer state."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from areal.api import Batch, FinetuneSpec, TokenOutputs, TrainEngine
from areal.engine import state
from areal.engine.registry import create_engine
from areal.tests.harness.engine_bytes import bytes_on_device, optimizer_tensors_of
from areal.tests.harness.tiny import (
    JAX,
    config,
    family_dir,
    global_batch,
    gradients_of,
    layout,
    layouts,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.utils import platform
from areal.utils.dtensor import local_part
from areal.utils.functional.chunked_head import _Chunks
from areal.utils.profiling import host_memory
from areal.utils.releases import fsdp_param_groups

LARGE_VOCAB = 4096


class Largest(TorchDispatchMode):
    """Size in elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.by = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.numel() > self.elements:
                self.elements, self.by = x.numel(), f"{func} -> {list(x.shape)}"
        return out


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count operations that read tensor values on the host: with a device, each would synchronize."""
    waits: Counter[str] = Counter()

    def counting(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            waits[name] += 1
            return plain(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        # These functions read targets where this is free: on the CPU only.
        stack.enter_context(mock.patch("areal.utils.functional.logprobs._check_ids"))
        stack.enter_context(mock.patch("areal.utils.functional.logprobs._rows_with_targets", return_value=None))
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            stack.enter_context(mock.patch.object(Tensor, name, counting(name, getattr(Tensor, name))))
        yield waits


@pytest.mark.world(1)
def test_step_never_allocates_full_logits() -> None:
    long = [{key: torch.cat([x] * 20) if x.dim() else x for key, x in sample.items()} for sample in global_batch()]
    tokens = sum(len(sample["input_ids"]) for sample in long)

    def with_entropy(out: TokenOutputs, batch: Batch) -> Tensor:
        return loss(out, batch) - (out.entropy * batch["loss_mask"]).sum()

    options: dict[str, Any] = {"path": family_dir("qwen3", vocab_size=LARGE_VOCAB), "mb_spec": {}}
    with started("fsdp:d1", **options) as engine:
        verbs: dict[str, Callable[[], Any]] = {
            "train": lambda: engine.train_batch(long, with_entropy, outputs=("logprobs", "entropy")),
            "eval": lambda: engine.eval_batch(long, with_entropy, outputs=("logprobs", "entropy")),
            "forward": lambda: engine.forward_batch(long),
        }
        for name, verb in verbs.items():
            with mock.patch("areal.utils.functional.logprobs._default_chunk", return_value=128), Largest() as largest:
                verb()
            assert largest.elements >= LARGE_VOCAB * 32, f"{name}: the embedding at least was to be seen"
            assert largest.elements < tokens * LARGE_VOCAB // 2, f"{name}: {largest.by}"
        with Largest() as largest:
            engine.forward_batch(long, outputs=("logits",))
        assert largest.elements >= tokens * LARGE_VOCAB, "the measure sees logits where they are asked for"


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_kept_and_recomputed_logits_give_equal_results(backend: str) -> None:
    steps, made = [], []
    for kept in (0, None):
        with started(backend, kept_logits_mb=kept) as engine:
            with mock.patch.object(_Chunks, "_write", autospec=True, side_effect=_Chunks._write) as write:
                steps.append(engine.train_batch(local_batch(engine, global_batch()), loss))
            made.append(write.call_count)
    assert made[0] == 2 * made[1], "a stage without a head makes none"
    assert steps[0].loss == steps[1].loss
    assert steps[0].grad_norm == steps[1].grad_norm


# Megatron-Core's stages send each other tensor shapes and read them on the host.
@pytest.mark.parametrize("backend", layouts(1, 2, but=("megatron:p2",)))
def test_micro_batches_do_not_synchronize_with_the_device(backend: str) -> None:
    result: dict[int, dict[str, Counter[str]]] = {}
    for n_mbs in (2, 4):
        with started(backend, mb_spec={"n_mbs": n_mbs}) as engine:
            batch = local_batch(engine, [*global_batch(0), *global_batch(1)])
            verbs: dict[str, Callable[[], Any]] = {
                "train": lambda e=engine, b=batch: e.train_batch(b, loss),
                "eval": lambda e=engine, b=batch: e.eval_batch(b, loss),
                "forward": lambda e=engine, b=batch: e.forward_batch(b),
            }
            result[n_mbs] = {}
            for name, verb in verbs.items():
                verb()  # AdamW allocates its state in the first step
                with counted_waits() as waits:
                    step = verb()
                result[n_mbs][name] = waits
                if name == "train":
                    assert step.n_mbs == n_mbs
    for name, waits in result[4].items():
        assert waits == result[2][name], f"{name}: {waits} with four micro-batches, {result[2][name]} with two"
        assert backend != "fsdp:d1" or waits.total() <= 4, f"{name}: {waits}"


# ---- gradients


@contextmanager
def unsharded_bytes(engine: TrainEngine) -> Iterator[list[int]]:
    """Return the bytes of unsharded gradients after each backward inside."""
    modules = [module for module in engine._components.model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in fsdp_param_groups(module)]
    backward, result = Tensor.backward, list[int]()

    def counting(self: Tensor) -> None:
        backward(self)
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        # From torch 2.15 on both are one tensor.
        grads = {id(x): x for p in parameters for x in (p.unsharded_accumulated_grad, p._unsharded_param.grad)}
        result.append(sum(local_part(grad).nbytes for grad in grads.values() if grad is not None))

    with mock.patch.object(Tensor, "backward", counting):
        yield result


@pytest.mark.parametrize("backend", layouts(2, engine="fsdp", but=("fsdp:p2",)))
def test_default_reduction_of_gradients_depends_on_the_size_of_the_model(backend: str) -> None:
    with started(backend) as engine:
        n = sum(parameter.numel() for parameter in engine._components.model.parameters())
    # float32 on two ranks: 16 bytes of state for half of the parameters, and 4 for the other half of the gradients.
    state, room = 16 * (n // 2), 4 * 4 * (n // 2)
    result = {}
    for memory in (1, state + room - 1, state + room):
        with mock.patch.object(platform, "total_memory", return_value=memory), started(backend) as engine:
            mbs = engine.microbatches(local_batch(engine, global_batch()))
            with unsharded_bytes(engine) as kept:
                engine.forward_backward(local_batch(engine, global_batch()), loss)
            result[memory] = max(kept) / n, engine._components.applied["gradient reduction"].split(", ")[0]
            assert len(kept) == len(mbs) > 1
    assert list(result.values()) == [(0.0, "on each micro-batch")] * 2 + [(4.0, "once per call")]


@pytest.mark.world(1)
def test_default_reduction_of_gradients_is_once_per_call_on_one_rank() -> None:
    with mock.patch.object(platform, "total_memory", return_value=1), started("fsdp:d1") as engine:
        assert engine._components.applied["gradient reduction"].startswith("once per call, chosen by size: ")


# ---- offload


@pytest.mark.parametrize("backend", layouts(1, 2, also=JAX))
@pytest.mark.parametrize("after", ["train", "eval", "forward"])
def test_offload_frees_the_device_and_restores_bitwise(backend: str, after: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        engine.train_batch(batch, loss)
        engine.forward_backward(batch, loss)
        weights, gradients = weights_of(engine), gradients_of(engine)
        if after == "eval":
            engine.eval_batch(batch, loss)
        if after == "forward":
            engine.forward_batch(batch)
        before = bytes_on_device(engine)
        assert all(before.values())
        engine.offload()
        assert bytes_on_device(engine) == {"params": 0, "grads": 0, "optimizer": 0}
        engine.offload()
        engine.onload()
        assert {kind: bytes_on_device(engine)[kind] for kind in ("grads", "optimizer")} == {
            kind: before[kind] for kind in ("grads", "optimizer")
        }
        assert same_bits(weights, weights_of(engine))
        assert same_bits(gradients, gradients_of(engine))
        assert bytes_on_device(engine) == before or after != "train"


class Copies(TorchDispatchMode):
    """Appends to ``events`` the name of each copy."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            non_blocking = (args[2:] or [(kwargs or {}).get("non_blocking")])[0]
            blocks = func is not torch.ops.aten.copy_.default or not non_blocking
            self._events.append("blocking copy" if blocks else "copy")
        return func(*args, **(kwargs or {}))


@contextmanager
def transfers(engine: TrainEngine) -> Iterator[list[str]]:
    """Return the transfers to host memory inside, in order: allocations, copies, waits, and releases of the allocator's memory."""
    events: list[str] = []

    def release(device: torch.device) -> None:
        events.append("release" if not sum(bytes_on_device(engine).values()) else "early release")

    allocate = platform.host_buffer
    with (
        mock.patch.object(platform, "host_buffer", lambda *args: events.append("allocation") or allocate(*args)),
        mock.patch.object(platform, "synchronize", side_effect=lambda device: events.append("wait")),
        mock.patch.object(platform, "empty_cache", release),
        Copies(events),
    ):
        yield events


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_offload_uses_kept_memory_waits_once_and_returns_memory_to_the_device(backend: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        engine.train_batch(batch, loss)
        engine.forward_backward(batch, loss)
        weights, gradients = weights_of(engine), gradients_of(engine)
        moments = [x.clone() for x in optimizer_tensors_of(engine)]
        moved = sum(bytes_on_device(engine).values())
        made, logged = [], []
        recorded = mock.patch.object(state.logger, "info", lambda *args: logged.append(args))
        for _ in range(2):
            with transfers(engine) as events, recorded:
                engine.offload()
            assert "blocking copy" not in events
            assert [event for event in events if event not in ("allocation", "copy")] == ["wait", "release"]
            made.append(events.count("allocation"))
            with transfers(engine) as events:
                engine.onload()
            assert {*events} == {"copy", "wait"}
            assert events.count("wait") == 1
        assert made[0] > 0
        assert made[1] == 0, "the memory of the first offload is used again"
        assert same_bits(weights, weights_of(engine))
        assert same_bits(gradients, gradients_of(engine))
        assert all(map(torch.equal, moments, optimizer_tensors_of(engine)))
        # Rank 0 logs its bytes. The next step reports those of all ranks, once.
        assert [args[1] for args in logged] == ([f"{moved:,}"] * 2 if engine.control.rank == 0 else [])
        total = engine.control.gather(moved)
        assert engine.forward_backward(batch, loss).metrics["offloaded_bytes"] == 2 * sum(total)
        assert "offloaded_bytes" not in engine.forward_backward(batch, loss).metrics


@pytest.mark.parametrize("backend", layouts(1, 2, also=JAX))
def test_step_reports_onload(backend: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        assert "onloaded_bytes" not in engine.train_batch(batch, loss).metrics
        on_device = bytes_on_device(engine)
        engine.offload()
        params = engine.eval_batch(batch, loss).metrics["onloaded_bytes"]
        rest = engine.train_batch(batch, loss).metrics["onloaded_bytes"]
        assert "onloaded_bytes" not in engine.eval_batch(batch, loss).metrics
        here = torch.tensor([float(on_device["params"]), float(sum(on_device.values()))])
        torch.distributed.all_reduce(here)
        assert [params, params + rest] == here.tolist()


@pytest.mark.parametrize("backend", layouts(1, 2, also=JAX))
def test_every_verb_onloads_required_tensors(backend: str) -> None:
    with started(backend) as engine, started(backend) as untouched:
        batch = local_batch(engine, global_batch())
        verbs: tuple[Callable[[TrainEngine], Any], ...] = (
            lambda e: e.train_batch(batch, loss).loss,
            lambda e: e.eval_batch(batch, loss).loss,
            lambda e: torch.cat(e.forward_batch(batch)).tolist(),
            lambda e: e.forward_backward(batch, loss).loss,
            lambda e: sorted((name, x.tolist()) for name, x in e.named_gradients()),
            lambda e: e.forward_backward(batch, loss).loss,
            lambda e: sorted((name, x.tolist()) for name, x in e.named_tensors()),
            lambda e: e.optimizer_step(),
            lambda e: e.train_batch(batch, loss).loss,
        )
        for i, verb in enumerate(verbs):
            engine.offload()
            assert verb(engine) == verb(untouched), f"verb {i}"
        engine.forward_backward(batch, loss)
        engine.offload()
        engine.zero_grad()
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            engine.named_gradients()
        assert engine.train_batch(batch, loss).loss == untouched.train_batch(batch, loss).loss
        assert same_bits(weights_of(engine), weights_of(untouched))


@pytest.mark.parametrize("backend", layouts(1, 2, also=JAX))
def test_each_kind_of_tensor_is_offloaded_separately(backend: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        engine.train_batch(batch, loss)
        engine.forward_backward(batch, loss)
        before = bytes_on_device(engine)
        for kind in before:
            engine.offload(**{other: other == kind for other in before})
            result = bytes_on_device(engine)
            assert result == {**before, kind: 0}
            engine.onload(**{other: other == kind for other in before})
            assert bytes_on_device(engine) == before


@pytest.mark.parametrize("backend", [*layouts(1), layout("jax:d1")])
def test_offload_to_files_reduces_resident_memory(backend: str, tmp_path: Path) -> None:
    path = family_dir("qwen3", vocab_size=300_000)
    with started(backend, path=path, offload_dir=str(tmp_path)) as engine:
        batch = local_batch(engine, global_batch())
        engine.train_batch(batch, loss)
        weights, expected = weights_of(engine), engine.eval_batch(batch, loss).loss
        moved = sum(bytes_on_device(engine).values())
        assert moved > 200e6
        platform.give_back(engine.device)  # what the step freed
        before = resident_bytes()
        engine.offload()
        freed = before - resident_bytes()
        (folder,) = tmp_path.iterdir()
        assert sum(file.stat().st_size for file in folder.iterdir()) == moved
        # The kernel may have taken back pages before, such as those of moments that are all zero, and takes other free ones with them.
        assert moved / 2 < freed < moved * 1.5
        assert engine.eval_batch(batch, loss).loss == expected
        engine.onload()
        assert not list(folder.iterdir())
        assert same_bits(weights_of(engine), weights)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", [layout("fsdp:d1"), layout("jax:d1")])
def test_missing_offload_folder_raises(backend: str, tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match=r"offload_dir = .*missing")
    with create_engine(config(backend, offload_dir=str(tmp_path / "missing"))) as engine, refused:
        engine.initialize(FinetuneSpec(total_train_steps=1))


def resident_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile", "RssShmem")))


@pytest.mark.world(1)
def test_offload_of_nothing_returns_unused_host_memory() -> None:
    with started("fsdp:d1") as engine, mock.patch.object(host_memory, "trim", wraps=host_memory.trim) as trim:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        before = bytes_on_device(engine)
        assert not trim.called, "training would allocate the memory again in each step"
        engine.offload(params=False, grads=False, optimizer=False)
        assert trim.call_count == 1
        assert bytes_on_device(engine) == before
