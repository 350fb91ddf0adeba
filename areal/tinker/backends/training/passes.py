"""Forward and backward passes of requests: their data as samples of an engine, the call, and results in the forms of the data.

Requests of several models share a call where that is faster. The functions at the end run on the ranks. Errors of an engine become those of
the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api import IGNORE_INDEX, Batch, MicroBatchSpec, ParallelDims, TokenOutputs, TrainEngine
from areal.dispatch import Executor, WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.engine.batch_rules import rules_of
from areal.engine.model.hub import read_config
from areal.tinker.backends.errors import BackendLostError, ServerError, UserError
from areal.tinker.backends.losses.loss_interface import CLIP_KEYS, LossByModel, ProtocolLoss
from areal.tinker.backends.losses.loss_table import make_loss
from areal.tinker.backends.prepared import Datum, PassResult, PreparedBatch
from areal.utils.data import ADAPTER
from areal.utils.distributed import EngineLostError

FEWEST_TOKENS = 4
"""Products of fewer rows round in another way than those of many."""

SHORT = 200
"""Tokens of a request up to which a call of eight models was measured to be at least 1.5 times as fast as eight calls."""

_RUNS = ("fsdp", "megatron")
"""Engines that compute each adapter of a call as in a call with it alone."""

_MULTIPLE = 32
"""Widths that are multiples of this have products whose rows do not depend on the number of rows."""


@dataclass(frozen=True)
class Pass:
    """A request that is ready for the engine.

    Attributes:
        batch: the request.
        adapter: name of the model's adapter in the engine.
        loss: its loss.
        samples: its data, as the engine's samples.
    """

    batch: PreparedBatch
    adapter: str
    loss: ProtocolLoss
    samples: Sequence[dict[str, Tensor]]

    @property
    def form(self) -> tuple[Any, ...]:
        """Keys of a sample, and shape of its targets at one position: equal in all samples of a call."""
        first = self.samples[0]
        return (sorted(first), tuple(first["target_ids"].shape[1:]))


def divide_into_calls(passes: Sequence[Pass], most_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of the requests of each call: requests of different models and equal form, if they are short.

    Args:
        passes: requests, of which those of one model run in this order.
        most_tokens: most tokens of a request that shares a call.
    """
    calls: list[list[int]] = []
    for index, each in enumerate(passes):
        # A call that a later request joins must not come before an earlier request of the same model.
        first = max((k for k, call in enumerate(calls) if each.adapter in _adapters(passes, call)), default=-1) + 1
        fitting = [call for call in calls[first:] if _fit(passes[call[0]], each, most_tokens)]
        if fitting:
            fitting[0].append(index)
        else:
            calls.append([index])
    yield from calls


def _adapters(passes: Sequence[Pass], call: Sequence[int]) -> set[str]:
    return {passes[index].adapter for index in call}


def _fit(one: Pass, other: Pass, most_tokens: int) -> bool:
    """Return whether two requests of different models may share a call."""
    return one.form == other.form and all(FEWEST_TOKENS <= each.batch.tokens <= most_tokens for each in (one, other))


def run_passes(
    group: WorkerGroup,
    names: Sequence[str],
    passes: Sequence[Pass],
    *,
    train: bool,
    mb_spec: MicroBatchSpec | None = None,
) -> list[PassResult]:
    """Run the requests of one call. Nothing is added to any pending gradient if it raises.

    Args:
        group: the engine.
        names: names of all adapters, in the engine's order.
        passes: requests of different models.
        train: compute gradients.
        mb_spec: rules of micro-batches; ``None`` for those of the configuration.
    """
    # 1. One batch, whose samples name their adapters.
    indices = [names.index(each.adapter) for each in passes]
    samples = [
        {**sample, ADAPTER: torch.tensor(index)}
        for index, each in zip(indices, passes, strict=True)
        for sample in each.samples
    ]
    loss = LossByModel({index: each.loss for index, each in zip(indices, passes, strict=True)})

    # 2. One pass of the engine.
    if train:
        step = group.forward_backward(
            samples, loss, unit_weight, normalization="sum", returns=("logprobs",), mb_spec=mb_spec
        )
    else:
        step = group.eval_batch(samples, loss, unit_weight, returns=("logprobs",), mb_spec=mb_spec)

    # 3. The results of each request.
    results, logprobs = [], iter(step.outputs["logprobs"])
    for index, each in zip(indices, passes, strict=True):
        own = [next(logprobs) for _ in each.samples]
        results.append(PassResult(target_arrays(own, each.batch.data), LossByModel.metrics_of(index, step.metrics)))
    return results


def probe_pass(adapter: str, tokens: int, max_tokens: int, copies: int) -> Pass:
    """Return a pass whose memory can be measured: copies of so many tokens, in samples of at most ``max_tokens``."""
    loss = make_loss("cross_entropy", {})
    lengths = [min(max_tokens, tokens - start) for start in range(0, tokens, max_tokens)]
    data = [Datum(np.zeros(n, np.int64), np.zeros(n, np.int64), {}) for n in lengths * copies]
    return Pass(PreparedBatch(adapter, data, "cross_entropy"), adapter, loss, engine_samples(data, loss))


def rounds_alike(model: str, dtype: str, dims: ParallelDims, threads: int) -> bool:
    """Return whether requests that share a call have the bits of separate calls, as far as that was measured.

    That is so on one CPU process with one thread, in float32, for a model without experts whose widths are multiples of 32. On JAX, several
    adapters are another program than one.
    """
    config = read_config(model).get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    widths = (
        config.hidden_size,
        getattr(config, "intermediate_size", None) or 1,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )
    experts = any("expert" in name and value for name, value in config.to_dict().items())
    plain = dims.world_size == threads == 1 and dtype == "float32" and not torch.cuda.is_available()
    return plain and dims.backend in _RUNS and not experts and all(width % _MULTIPLE == 0 for width in widths)


def engine_samples(data: Sequence[Datum], loss: ProtocolLoss) -> list[dict[str, Tensor]]:
    """Return one sample for each datum, with ``input_ids``, ``target_ids`` and the values that the loss reads.

    If the data differ in their numbers of targets per position, the missing ones are added without a target. Thresholds that some data have are
    added to the others from the configuration of the loss, and so are weights of 1.

    Raises:
        UserError: a datum lacks a value, or marks no token for its sequence ratio.
    """
    names = set(loss.inputs - {"target_tokens"})
    names |= {name for name in loss.optional if any(name in datum.values for datum in data)}
    width = max(_width(datum.target_ids) for datum in data)
    return [_sample(index, datum, sorted(names), width, loss) for index, datum in enumerate(data)]


def _sample(index: int, datum: Datum, names: Sequence[str], width: int, loss: ProtocolLoss) -> dict[str, Tensor]:
    targets = _widened(datum.target_ids, np.int64, width, IGNORE_INDEX)
    sample = {"input_ids": _tensor(datum.input_ids, np.int64), "target_ids": targets}
    for name in names:
        values = datum.values.get(name)
        if values is None and name in CLIP_KEYS:
            values = np.full(datum.target_ids.shape, getattr(loss, name), dtype=np.float32)
        if values is None and name == "weights" and name in loss.optional:
            values = np.ones(datum.target_ids.shape, dtype=np.float32)
        if values is None:
            raise UserError(f"data[{index}].loss_fn_inputs has no {name!r}, which the loss needs: add it")
        # The widened targets have the log-prob 0 and, with these zeros, the loss 0.
        sample[name] = _widened(values, np.float32, width, 0)
    if "sequence_ratio_mask" in sample and not sample["sequence_ratio_mask"].any() and sample["advantages"].any():
        raise UserError(
            f"data[{index}].loss_fn_inputs['sequence_ratio_mask'] marks no token: mark those of the sequence's ratio"
        )
    return sample


def target_arrays(outputs: Sequence[Tensor], data: Sequence[Datum]) -> list[np.ndarray]:
    """Return per-target outputs of an engine as float32 arrays of the shapes of the targets."""
    arrays = []
    for output, datum in zip(outputs, data, strict=True):
        array: np.ndarray[Any, Any] = output.detach().cpu().float().numpy()
        shape = datum.target_ids.shape
        if array.ndim > 1:
            array = array[:, : _width(datum.target_ids) or 1].reshape(shape)
        arrays.append(array)
    return arrays


def _width(targets: np.ndarray) -> int:
    """Return the number of targets of a position if the array has that dimension, else 0."""
    return targets.shape[1] if targets.ndim > 1 else 0


def _widened(values: np.ndarray, dtype: Any, width: int, fill: float) -> Tensor:
    """Return an array ``[T]`` or ``[T, K]`` as a tensor ``[T]``, or ``[T, width]`` with a width above 0."""
    if width and values.shape[1:] != (width,):
        wide = np.full((len(values), width), fill, dtype=dtype)
        columns = values.reshape(len(values), -1)
        wide[:, : columns.shape[1]] = columns
        values = wide
    return _tensor(values, dtype)


def _tensor(values: np.ndarray, dtype: Any) -> Tensor:
    # Arrays of a request may be views of its bytes, which cannot be written: those are copied.
    return torch.from_numpy(np.require(values, dtype=dtype, requirements=["C", "W"]))


def lost_error(cause: BaseException) -> BackendLostError:
    """Return the error of all calls after the loss of the ranks."""
    return BackendLostError(f"the training processes were lost, and all models with them: {cause}")


@contextmanager
def protocol_errors(executor: Executor) -> Iterator[None]:
    """Raise errors of the engine inside as those of the protocol.

    Args:
        executor: processes of the ranks.

    Raises:
        UserError: the engine has refused its arguments.
        BackendLostError: the ranks are lost.
        ServerError: any other error.
    """
    try:
        yield
    except (UserError, ServerError):
        raise
    except (EngineLostError, WorkerLostError) as error:
        raise lost_error(error) from error
    except ValueError as error:
        raise UserError(_in_terms_of_the_server(str(error))) from error
    except Exception as error:
        if executor.lost is not None:
            raise lost_error(executor.lost) from error
        raise ServerError(_in_terms_of_the_server(f"{type(error).__name__}: {error}")) from error


def _in_terms_of_the_server(text: str) -> str:
    """Return the text of an engine's error with the names of settings, and without its note on gradients, which are kept here."""
    discarded = " (all pending gradients were discarded; the engine can be used for the next call)"
    return text.replace(discarded, "").replace("mb_spec.max_tokens_per_mb", "backend_config.max_tokens_per_mb")


def unit_weight(batch: Batch) -> Tensor:
    """Return the loss weight of a micro-batch of a request: 1, so that the loss of data without weight is computed, too."""
    return batch["input_ids"].new_ones((), dtype=torch.float64)


def no_weight(batch: Batch) -> Tensor:
    """Return the loss weight 0. The gradient of such a micro-batch is exactly 0."""
    return batch["input_ids"].new_zeros((), dtype=torch.float64)


def no_loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Loss function of a batch without weight, which is never called."""
    raise RuntimeError("a batch without weight has no loss")


def vocab_size(engine: TrainEngine, _: Any) -> int:
    """Return the number of token ids.

    Raises:
        ValueError: the engine does not derive from the template of engines.
    """
    rules = rules_of(engine)
    if rules is None:
        raise ValueError("the engine has no batch_rules, which the backend needs: derive it from BaseTrainEngine")
    return rules.vocab_size


def threads(engine: TrainEngine, _: Any) -> int:
    """Return the number of threads of a product on the CPU."""
    return torch.get_num_threads()
