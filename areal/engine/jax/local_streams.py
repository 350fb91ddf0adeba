"""The streams of a micro-batch that the devices of one process compute, end to end as arrays ``[S, ...]``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.jax.inputs import Sizes, StreamInputs, empty_stream
from areal.engine.stream.layout import layout_of


class LocalStreams:
    """The inputs of one process for one micro-batch.

    Args:
        mb: the micro-batch.
        outputs, temperature: as for :class:`~areal.engine.jax.inputs.StreamInputs`.
        n: int. Streams that the devices of the process compute. Those without sequences are padding.

    Attributes:
        wanted: outputs to compute.
        adapters: runs of tokens with one adapter; ``None`` for the selected adapter.
    """

    def __init__(self, mb: MicroBatch, outputs: Outputs, temperature: float, n: int) -> None:
        self._n = n
        self.adapters = layout_of(mb, ContextParallel(None), rows=False).adapters
        # All streams of a process have the same factors, and so the same slots.
        names = () if self.adapters is None else self.adapters.names
        self._inputs = [StreamInputs(stream, outputs, temperature, names) for stream in mb.streams or (mb,)]
        self.wanted = self._inputs[0].wanted

    @property
    def sizes(self) -> Sizes:
        """Largest sizes of the streams, unpadded."""
        return Sizes.largest([inputs.sizes for inputs in self._inputs])

    def arrays(self, sizes: Sizes, dtype: np.dtype, parts: int = 1) -> dict[str, np.ndarray]:
        """Return the arrays of all streams, ``[S, ...]``; see :meth:`~areal.engine.jax.inputs.StreamInputs.arrays`."""
        streams = [inputs.arrays(sizes, dtype, parts) for inputs in self._inputs]
        streams += [empty_stream(streams[0])] * (self._n - len(streams))
        return {name: np.stack([stream[name] for stream in streams]) for name in streams[0]}

    def result(self, name: str, rows: Tensor) -> Tensor:
        """Return an output of the micro-batch ``[n, ...]`` from the computed rows ``[S, R, ...]``. Differentiable."""
        results = [inputs.result(name, rows[k]) for k, inputs in enumerate(self._inputs)]
        return results[0] if len(results) == 1 else torch.cat(results)
