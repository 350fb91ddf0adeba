"""Activations of layers that move to host memory and back, on a CPU whose copies happen as late as the waits allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from areal.engine.torch.activations import host_pool
from areal.engine.torch.activations.host_pool import HostPool
from areal.engine.torch.activations.offload import ActivationOffload
from areal.tests.unit.gpu.lazy_copies import lazily
from areal.utils import platform
from areal.utils.profiling.moved_bytes import MovedBytes

CPU = torch.device("cpu")


class Function(torch.autograd.Function):
    """Sum of tensors. The backward records what it reads, and which storages."""

    @staticmethod
    def forward(ctx: Any, read: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.read = read
        return torch.stack([x.sum() for x in tensors]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        ctx.read += [x.detach() for x in tensors]
        return None, *(grads[0].expand_as(x) for x in tensors)


class Layer(nn.Module):
    """A layer that saves the tensors which ``make`` returns."""

    def __init__(self, make: Callable[[Layer, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(8, 8))
        self.make, self.read = make, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return x + Function.apply(self.read, *self.make(self, x))


class Model(nn.Module):
    """Layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tensors_of(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def attached(model: Model, *, last_too: bool = False) -> tuple[ActivationOffload, MovedBytes]:
    moved = MovedBytes()
    with lazily():
        offload = ActivationOffload(CPU, moved)
    offload.attach(model, list(model.layers), tensors_of, last_too=last_too)
    return offload, moved


def plain(layer: Layer, x: Tensor) -> list[Tensor]:
    return [x * 2]


def views(layer: Layer, x: Tensor) -> list[Tensor]:
    """Different views of one storage."""
    base = torch.cat([x, x + 1, x + 2])
    return [base[3:7], base.t()[1:, 2:], base[:, ::2], base.view(-1)[5:9].expand(3, 4), base]


KINDS: dict[str, Callable[[Layer, Tensor], list[Tensor]]] = {
    "plain": plain,
    "views": views,
    "bfloat16": lambda layer, x: [(x * 3).bfloat16().t(), torch.full((40,), torch.nan) * x.sum()],
    "empty": lambda layer, x: [x[:0] * 1, x * 2],
    "weights": lambda layer, x: [layer.weight, layer.weight.t()[2:], layer.table[1:], x * 5],
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in KINDS.items()])
def test_backward_reads_the_same_values_and_geometry(make: Callable[[Layer, Tensor], list[Tensor]]) -> None:
    torch.manual_seed(0)
    model = Model(*(Layer(make) for _ in range(4)))
    x = torch.randn(8, 8, requires_grad=True)
    with lazily():
        model(x).sum().backward()
        expected, gradients = [[*layer.read] for layer in model.layers], [p.grad for p in model.parameters()]
        for layer in model.layers:
            layer.read.clear()
        model.zero_grad()
        offload, _ = attached(model)
        model(x).sum().backward()
    for layer, tensors in zip(model.layers, expected, strict=True):
        for read, right in zip(layer.read, tensors, strict=True):
            assert (read.shape, read.stride(), read.storage_offset()) == (
                right.shape,
                right.stride(),
                right.storage_offset(),
            )
            assert read.dtype == right.dtype
            assert torch.equal(read.nan_to_num(7), right.nan_to_num(7))
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient is None or torch.equal(gradient, parameter.grad)
    for layer in model.layers:
        layer.read.clear()
    assert (offload.counts.on_device, offload.counts.in_host) == (0, 0)


def test_storage_is_moved_and_restored_once() -> None:
    model = Model(Layer(views), Layer(plain), Layer(plain))
    _, moved = attached(model)
    with lazily():
        model(torch.randn(8, 8, requires_grad=True)).sum().backward()
    # The storage of the views has 3 * 64 elements, and that of the second layer 64. The last layer stays.
    assert moved.totals["activation_offloaded_bytes"] == (3 + 1) * 64 * 4
    storages = {x.untyped_storage()._cdata for x in model.layers[0].read}
    assert len(storages) == 1


def test_storage_of_several_layers_is_moved_once() -> None:
    shared = torch.randn(16, 16)
    model = Model(*(Layer(lambda layer, x: [shared, x * 2]) for _ in range(4)))
    _, moved = attached(model)
    with lazily():
        model(torch.randn(8, 8, requires_grad=True)).sum().backward()
    assert moved.totals["activation_offloaded_bytes"] == (shared.numel() + 3 * 64) * 4
    assert all(torch.equal(layer.read[0], shared) for layer in model.layers)


def test_weights_and_views_of_them_stay() -> None:
    model = Model(*(Layer(lambda layer, x: [layer.weight, layer.weight.t()[1:], layer.table]) for _ in range(3)))
    offload, moved = attached(model)
    with lazily():
        out = model(torch.randn(8, 8, requires_grad=True))
        assert offload.counts.on_device == 0, "weights are no activations"
        out.sum().backward()
    assert not moved.totals
    for layer in model.layers:
        weight, view, table = layer.read
        assert weight.data_ptr() == layer.weight.data_ptr()
        assert view.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
        assert table.data_ptr() == layer.table.data_ptr()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("last_too", [False, True])
def test_micro_batches_under_way_do_not_share_memory(order: tuple[int, ...], last_too: bool) -> None:
    model = Model(*(Layer(plain) for _ in range(3)))
    offload, moved = attached(model, last_too=last_too)
    inputs = [torch.full((8, 8), float(i), requires_grad=True) for i in range(3)]
    with lazily(), mock.patch.object(host_pool, "BLOCK_BYTES", 512):
        outs = [model(x) for x in inputs]
        for i in order:
            outs[i].sum().backward()
        for layer in model.layers:
            values = [float(x.flatten()[0]) for x in layer.read]
            assert values == [values[order.index(j)] for j in order]
        assert [float(x.flatten()[0]) for x in model.layers[0].read] == [2.0 * i for i in order]
        del outs
        # The memory is used again.
        blocks = len(offload._tools.pool._free)
        model(inputs[0]).sum().backward()
        assert len(offload._tools.pool._free) == blocks
    assert moved.totals["activation_offloaded_bytes"] == 4 * (3 if last_too else 2) * 256


def test_backward_in_two_parts_reads_twice() -> None:
    model = Model(*(Layer(lambda layer, x: [x * layer.weight]) for _ in range(3)))
    attached(model, last_too=True)
    x = torch.randn(8, 8, requires_grad=True)
    with lazily():
        out = model(x).sum()
        (of_input,) = torch.autograd.grad(out, x, retain_graph=True)
        of_weights = torch.autograd.grad(out, list(model.parameters()))
    again = Model(*model.layers)
    for layer in again.layers:
        del layer.forward
    out = again(x).sum()
    assert torch.equal(of_input, torch.autograd.grad(out, x, retain_graph=True)[0])
    assert all(map(torch.equal, of_weights, torch.autograd.grad(out, list(model.parameters()))))


def test_activations_of_an_ended_call_are_released() -> None:
    model = Model(*(Layer(plain) for _ in range(3)))
    offload, _ = attached(model)
    with lazily():
        out = model(torch.randn(8, 8, requires_grad=True))
        assert offload.counts.in_host == 2 * 256
        offload.end_call()
        assert offload.counts.in_host == 0
        with pytest.raises(RuntimeError, match=r"activations of a call that has ended.*fsdp\.activation_offload"):
            out.sum().backward()


def test_error_of_a_layer_leaves_no_hooks() -> None:
    def fail(layer: Layer, x: Tensor) -> list[Tensor]:
        raise ValueError("of the layer")

    model = Model(Layer(plain), Layer(fail))
    offload, _ = attached(model)
    x = torch.randn(8, 8, requires_grad=True)
    with lazily():
        with pytest.raises(ValueError, match="of the layer"):
            model(x)
        offload.end_call()
        assert offload.counts.in_host == 0
        assert offload.hooks() is None
        (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_layer_without_its_model_moves_nothing() -> None:
    model = Model(Layer(plain), Layer(plain))
    _, moved = attached(model)
    model.layers[0](torch.randn(8, 8, requires_grad=True)).sum().backward()
    assert not moved.totals


# ---- host memory


def test_blocks_are_used_again_for_other_sizes() -> None:
    made: list[int] = []

    def allocate(nbytes: int, device: torch.device) -> Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    with mock.patch.object(host_pool, "BLOCK_BYTES", 1024), mock.patch.object(platform, "host_buffer", allocate):
        pool = HostPool(CPU)
        blocks, pieces = pool.take([1000, 1025, 3000, 1])
        assert [sum(map(len, each)) for each in pieces] == [1000, 1025, 3000, 1]
        # Copies begin at multiples of 512 bytes, so that 1000 bytes take a block, and 1025 one and a half.
        assert len(blocks) == len(made) == 6
        for value, each in enumerate(pieces):
            for piece in each:
                piece.fill_(value)
        assert all((piece == value).all() for value, each in enumerate(pieces) for piece in each)
        others, _ = pool.take([10])
        assert not {x.data_ptr() for x in others} & {x.data_ptr() for x in blocks}
        pool.give_back(blocks)
        pool.take([7000])
        assert len(made) == 8


# ---- devices


def test_meta_tensors_are_not_copied() -> None:
    meta = torch.device("meta")
    copies = platform.side_copies(meta)
    (block,), ((piece,),) = HostPool(meta).take([1000])
    assert block.untyped_storage().nbytes() == 1, "in a plan, a block needs no memory"
    copies.wait(copies.run([(piece, torch.empty(1000, dtype=torch.uint8, device=meta))]))


class Stream:
    """Stand-in of a CUDA stream that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.calls.append(f"event of {self.name}")
        return "event"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None:
        self.calls.append(f"in {self.name}")

    def __exit__(self, *error: Any) -> None:
        pass


def test_copies_of_a_gpu_are_in_their_own_stream() -> None:
    calls: list[str] = []
    current, side, copied = Stream("compute", calls), Stream("copies", calls), mock.Mock(spec=Tensor)
    copied.copy_.side_effect = lambda source, non_blocking: calls.append(f"copy {non_blocking}")
    with (
        mock.patch.object(torch.cuda, "Stream", return_value=side),
        mock.patch.object(torch.cuda, "current_stream", return_value=current),
        mock.patch.object(torch.cuda, "stream", side_effect=lambda stream: stream),
    ):
        copies = platform.side_copies(torch.device("cuda", 0))
        mark = copies.run([(copied, torch.empty(1))])
        copies.wait(mark)
    assert calls == [
        "copies waits for compute",
        "in copies",
        "copy True",
        "event of copies",
        "compute waits for event",
    ]
