"""Rates of a machine, and the seconds that operations and collectives take at these rates."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Rates that a rank achieves. The defaults are 60 % of the matrix rate and 80 % of the bandwidths of an H100 SXM with InfiniBand NDR.

    Attributes:
        tflops: TFLOP/s of matrix products and attention in bfloat16.
        memory_gbps: GB/s of the device's memory.
        node_gbps: GB/s that a rank sends to ranks of its node, in one direction.
        network_gbps: GB/s that a rank sends to other nodes, in one direction.
        ranks_per_node: number of ranks on a node.
        latency_us: microseconds for each doubling of the ranks of a collective.
        launch_us: microseconds that every operation takes at least.
    """

    tflops: float = 590.0
    memory_gbps: float = 2680.0
    node_gbps: float = 360.0
    network_gbps: float = 40.0
    ranks_per_node: int = 8
    latency_us: float = 10.0
    launch_us: float = 5.0

    def operation_seconds(self, flops: float, nbytes: float, *, itemsize: int = 2) -> float:
        """Return the time of an operation: the longer of computing and of moving its bytes.

        Args:
            flops: floating point operations of matrix products.
            nbytes: bytes that are read and written.
            itemsize: bytes of an element. Products in float32 run at half of the bfloat16 rate, as TF32.
        """
        rate = self.tflops * 1e12 * min(1.0, 2 / itemsize)
        return max(flops / rate, nbytes / (self.memory_gbps * 1e9), self.launch_us * 1e-6)

    def collective_seconds(self, name: str, nbytes: float, size: int, stride: int) -> float:
        """Return the time of a collective by a ring algorithm.

        Every rank sends ``(size - 1) / size`` of the bytes, twice in an all-reduce (Patarasu and Yuan, 2009).

        Args:
            name: name of the collective.
            nbytes: bytes of its larger buffer on a rank.
            size: number of ranks.
            stride: distance between neighbouring ranks of the group.
        """
        if size == 1:
            return 0.0
        sent = nbytes if name in ("send", "recv") else nbytes * (size - 1) / size * (2 if name == "all_reduce" else 1)
        # A group with several ranks on each node sends through the network cards of all of them.
        on_node = max(1, min(size, self.ranks_per_node // max(stride, 1)))
        inside = size * stride <= max(self.ranks_per_node, stride) or on_node == size
        rate = self.node_gbps if inside else min(self.node_gbps, self.network_gbps * on_node)
        # All-to-all sends to each rank directly: only the bytes for ranks on other nodes cross the network, through the own card.
        if name == "all_to_all" and not inside:
            crossing = sent * (size - on_node) / max(size - 1, 1)
            return crossing / (self.network_gbps * 1e9) + self.latency_us * 1e-6 * math.log2(size)
        steps = 1.0 if name in ("send", "recv") else math.log2(size)
        return sent / (rate * 1e9) + self.latency_us * 1e-6 * steps

    def describe(self) -> str:
        """Return the assumptions in one line."""
        return (
            f"assumed: {self.tflops:g} TFLOP/s, memory {self.memory_gbps:g} GB/s, node {self.node_gbps:g} GB/s, network "
            f"{self.network_gbps:g} GB/s per rank, {self.ranks_per_node} ranks per node, latency {self.latency_us:g} us, "
            f"launch {self.launch_us:g} us"
        )
