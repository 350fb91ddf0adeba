"""Faults of a step: errors of the model and of process functions, outputs that a loss did not name, and checks of the returned losses."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from areal.api.batch import TokenOutputs
from areal.api.microbatch import MicroBatch
from areal.utils import platform


class Faults:
    """The errors of one call on this rank.

    Attributes:
        first: first error, or ``None``.
        broken: the model failed, so that this rank is out of step with its peers.
        final: this process cannot use its device any more.
        interrupt: what broke the model off, if that is no error, such as ``KeyboardInterrupt``. It is raised as it is.
        current_mb: micro-batch that the model is running.
    """

    def __init__(self) -> None:
        self.first: Exception | None = None
        self.interrupt: BaseException | None = None
        self.broken = False
        self.final = False
        self.current_mb: MicroBatch | None = None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Store an error inside instead of raising it."""
        try:
            yield
        except Exception as error:
            self.first = error
            self.final = platform.is_device_lost(error)
            self.broken = self.broken or self.final

    @contextlib.contextmanager
    def of_the_model(self) -> Iterator[None]:
        """Store an error of the model inside, or an interrupt, instead of raising it."""
        try:
            yield
        except BaseException as error:
            # Its frames refer to activations and process groups.
            traceback.clear_frames(error.__traceback__)
            self.broken = True
            self.final = self.final or platform.is_device_lost(error)
            self.first = self.first or locate(error, self.current_mb)
            self.interrupt = None if isinstance(error, Exception) else error


@contextlib.contextmanager
def refusing_backward(outputs: TokenOutputs) -> Iterator[None]:
    """Refuse a backward into the model inside, before it has begun: a loss function returns its loss, and the engine calls backward.

    Gradients with respect to outputs (``torch.autograd.grad``) are computed.

    Raises:
        ValueError: something inside calls backward.
    """

    def refuse(_: tuple[Tensor, ...]) -> None:
        raise ValueError(
            "loss_fn called backward itself: return the loss, a scalar tensor, for which the engine calls backward"
        )

    nodes = {x.grad_fn for x in _leaves(outputs) if x.grad_fn is not None}
    hooks = [node.register_prehook(refuse) for node in nodes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_loss(loss: Tensor | None, mb: MicroBatch) -> Tensor | None:
    """Return the loss if backward can start from it.

    Raises:
        ValueError: the loss is neither ``None`` nor a scalar with a graph.
    """
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ValueError(
            f"the process function returned a loss that is not a scalar tensor for micro-batch {mb.index}: "
            "return a sum, or None"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of micro-batch {mb.index} has no graph: it does not depend on the outputs, or they were "
            "detached; compute it from the TokenOutputs that the function was given"
        )
    return loss


def locate(error: BaseException, mb: MicroBatch | None) -> Exception:
    """Add the micro-batch to the text of an error, the line that raised it, and the way out if memory ran out."""
    if mb is None:
        return error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
    where = f"micro-batch {mb.index} of {mb.n_tokens} tokens ({mb.padded_length} padded, {len(mb.seqlens)} sequences)"
    if platform.is_out_of_memory(error):
        # A sequence is never cut: fewer tokens in a micro-batch help only where it has several.
        lower = (
            "lower mb_spec.max_tokens_per_mb" if len(mb.seqlens) > 1 else "shorten the sequence, or choose a larger c"
        )
        return RuntimeError(f"out of memory in {where}: {lower}, or set activation_checkpointing = 'full' ({error})")
    if isinstance(error, ValueError):
        return ValueError(f"{error} (in {where})")
    return RuntimeError(f"{type(error).__name__} in {where}: {error}{_raised_at(error)}")


def _raised_at(error: BaseException) -> str:
    """Return the line that raised an error, and the line of this package that led to it, as text in brackets."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    if not frames:
        return ""
    lines = [frames[-1], *(frame for frame in reversed(frames[:-1]) if frame[0].startswith("areal."))][:2]
    # Paths without the directory of the installation, which differs between the nodes of a cluster.
    files = ["/".join(Path(code.co_filename).parts[-module.count(".") - 1 :]) for module, code, _ in lines]
    at = [f"{file}:{line} in {code.co_name}" for file, (_, code, line) in zip(files, lines, strict=True)]
    return f" (raised at {', called at '.join(at)})"


def zero_gradient_loss(outputs: TokenOutputs) -> Tensor:
    """Return a loss of 0 whose backward gives every output a gradient of exactly 0, even for outputs that are not finite."""
    tensors = [x for x in _leaves(outputs) if x.requires_grad]
    if not tensors:
        raise ValueError("no output of the model depends on a parameter that is trained")
    return _ZeroGradientLoss.apply(*tensors)


def reach_all_heads(loss: Tensor | None, outputs: TokenOutputs) -> Tensor | None:
    """Return a loss of the same value and gradients, whose backward also reaches a head of which the loss reads no output.

    The ranks reduce gradients in the order in which the backward reaches parameters, also in micro-batches that only fill up, whose loss is
    :func:`zero_gradient_loss`. So all ranks must reach the same ones, whatever their losses read.
    """
    if loss is None:
        return None
    heads = [[x for x in _leaves(outputs, names) if x.requires_grad] for names in _HEADS]
    nodes = [{get_gradient_edge(x).node for x in head} for head in heads]
    read = _nodes_read(loss, set().union(*nodes))
    unread = [head[0] for head, its_nodes in zip(heads, nodes, strict=True) if head and not its_nodes & read]
    return loss + _ZeroGradientLoss.apply(*unread) if unread else loss


def map_outputs(fn: Any, outputs: TokenOutputs) -> TokenOutputs:
    """Apply ``fn`` to every tensor of ``outputs``."""
    values = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    return TokenOutputs(**{k: v if v is None else pytree.tree_map(fn, v) for k, v in values.items()})


_FIELDS = tuple(field.name for field in dataclasses.fields(TokenOutputs))
_HEADS = (("logprobs", "entropy", "topk"), ("logits",), ("values",))
"""Outputs of the heads. Each has its own parameters, or, between ranks with parts of the vocabulary, its own collectives."""


def _nodes_read(loss: Tensor, ends: set[Node]) -> set[Node]:
    """Return those of the nodes ``ends`` that a loss depends on. Does not look behind them."""
    found: set[Node] = set()
    waiting = [get_gradient_edge(loss).node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [] if node in ends else [after for after, _ in node.next_functions if after is not None]
    return found & ends


def _leaves(outputs: TokenOutputs, names: Sequence[str] = _FIELDS) -> list[Tensor]:
    return [x for x in pytree.tree_leaves([getattr(outputs, name) for name in names]) if x is not None]


class _ZeroGradientLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


class ReadOutputs(TokenOutputs):
    """Token outputs that record which missing outputs are read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in _FIELDS:
            self.missing().append(name)
        return value

    def missing(self) -> list[str]:
        """Return the names of the missing outputs that were read, in order."""
        # In the instance's dict, because the dataclass is frozen.
        return vars(self).setdefault("_missing", [])


@contextlib.contextmanager
def naming_missing_outputs(outputs: ReadOutputs) -> Iterator[None]:
    """Convert an error of arithmetic with a missing output inside to one that names the output.

    Raises:
        ValueError: the loss computed with an output that the call did not name.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error) or not outputs.missing():
            raise
        # Named as the caller writes them: a TopK for "topk".
        read = outputs.missing()
        names = [name for name in _FIELDS if vars(outputs)[name] is not None or name in read]
        written = ", ".join("TopK(k)" if name == "topk" else repr(name) for name in names)
        raise ValueError(
            f"loss_fn read the output {read[-1]!r}, which this call does not compute: pass outputs=({written})"
        ) from error
