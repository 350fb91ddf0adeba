"""Worker of a test server: member of a group, with the weights that it has loaded."""

from __future__ import annotations

import base64
import pickle
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.tests.harness.servers.group.memory import opened
from areal.tests.harness.servers.vllm_plugin import areal_fake_m2n as m2n

SECONDS = 60.0
"""Time limit of a receive."""
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class Refused(Exception):
    """An answer with status 500."""


class Worker:
    """One worker: member of the group, and its loaded weights."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.group: Any = None
        self.active = False
        self.in_place = False  # SGLang copies each tensor into its part of a layer
        self.weights: dict[str, Tensor] = {}
        self.pending: dict[str, list[tuple[str, Tensor]]] = {}  # tensors of layers that are not complete
        self.needed: Counter[str] = Counter()
        self.known = set(shapes)
        self.plan: dict[str, Any] = {}
        self.taken: list[tuple[int, int] | None] = []
        for name, shape in shapes.items():
            self.needed[layer_of(name)] += shape.numel()
        self.loaded: set[str] = set()

    def leave(self) -> None:
        group, self.group = self.group, None
        if isinstance(group, m2n.Comm):
            group.destroy()
        elif group is not None:
            group.abort()

    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]], packed: int | None) -> None:
        if self.group is None:
            raise Refused("weight transfer not initialized")
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)]
        if packed is None:
            for name, tensor in zip(names, tensors, strict=True):
                self._broadcast(tensor)
                self.load(name, tensor)
            return
        # A buffer ends after the tensor that exceeds the limit.
        batch: list[tuple[str, Tensor]] = []
        for i, entry in enumerate(zip(names, tensors, strict=True)):
            batch.append(entry)
            size = sum(tensor.nbytes for _, tensor in batch)
            if size > packed or i == len(names) - 1:
                buffer = torch.empty(size, dtype=torch.uint8)
                self._broadcast(buffer)
                for (name, tensor), data in zip(batch, buffer.split([t.nbytes for _, t in batch]), strict=True):
                    self.load(name, data.clone().view(tensor.dtype).view(tensor.shape))
                batch = []

    def read(self, info: dict[str, Any], gpu: str) -> None:
        """Load tensors from memory of the trainer on the same GPU."""
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        if gpu not in handles:
            raise Refused(f"IPC handle not found for GPU UUID {gpu}. Available UUIDs: {list(handles)}")
        parts = opened(handles[gpu])[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
        for name, dtype, shape, data in zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True):
            self.load(name, data.clone().view(getattr(torch, dtype)).view(shape))

    def join_shards(self, info: dict[str, Any], index: int) -> None:
        """Join the ranks of a trainer, and tell them what this worker takes, as vLLM's engine ``nccl_m2n`` does."""
        self.plan = info
        first = info["rank_offset"]
        self.group = m2n.Comm(base64.b64decode(info["nccl_unique_id_b64"]), first + index, info["world_size"], SECONDS)
        shards = info["dst_mesh_dims"][1]
        self.taken = [taken(name, shape, shards) for name, shape in zip(info["names"], info["shapes"], strict=True)]
        table = torch.tensor([each or (-2, -2) for each in self.taken], dtype=torch.int8)
        self.group.broadcast(table, first)

    def receive_shards(self, names: list[str]) -> None:
        """Receive this worker's part of each tensor."""
        plan, group = self.plan, self.group
        if group is None or names != plan["names"]:
            raise Refused("nccl_m2n weight transfer not initialized")
        for i, name in enumerate(names):
            if name not in self.known:
                raise Refused(f"there is no module or parameter named {name!r}")
            mesh, shape = tuple(plan["dst_mesh_dims"]), list(plan["shapes"][i])
            if self.taken[i] is not None:
                shape[self.taken[i][1]] //= mesh[1]
            part = torch.empty(shape, dtype=getattr(torch, plan["dtype_names"][i]))
            sides = {}
            for side, dims, start, codes in (
                ("src", tuple(plan["src_mesh_dims"]), 0, plan["src_placements"][i]),
                ("dst", mesh, plan["rank_offset"], self.taken[i]),
            ):
                dims, codes = (dims, codes) if codes is not None else ((dims[0] * dims[1], 1), (-1, 0))
                sides[f"{side}_mesh"] = m2n.Mesh(dims, start_rank=start)
                sides[f"{side}_placements"] = [m2n.Replicate() if code == -1 else m2n.Shard(code) for code in codes]
            m2n.reshard(None, part, group, None, handle=m2n.Handle(), **sides)
            self.weights[name] = part

    def load(self, name: str, tensor: Tensor) -> None:
        layer = layer_of(name)
        if self.in_place:
            self.weights[name] = tensor
            return
        if layer not in self.needed:
            raise Refused(f"there is no module or parameter named {name!r}")
        if layer in self.loaded:
            return  # excess tensors are dropped
        self.pending.setdefault(layer, []).append((name, tensor))
        if sum(each.numel() for _, each in self.pending[layer]) >= self.needed[layer]:
            self.weights.update(self.pending.pop(layer))
            self.loaded.add(layer)

    def reset(self) -> None:
        self.pending, self.loaded = {}, set()

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self.group.broadcast([tensor], options).wait()
        except RuntimeError:
            self.leave()  # releases workers that wait for this one
            raise


def taken(name: str, shape: list[int], shards: int) -> tuple[int, int] | None:
    """Return the placement over replicas and workers of a replica that a worker takes; ``None`` for the whole tensor."""
    dimension = 0 if "embed" in name else 1 if "o_proj" in name or "down_proj" in name else None
    return None if dimension is None or shards == 1 or shape[dimension] % shards else (-1, dimension)


def layer_of(name: str) -> str:
    """Return the name of the layer that a tensor belongs to, as the server fuses it."""
    for part, fused in FUSED.items():
        name = name.replace(part, fused)
    return name


def describe(worker: Worker) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in worker.weights.items()}
