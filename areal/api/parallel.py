"""Parallel layouts: the degree of each kind of parallelism, parsed from a short string."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.distributed as dist

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of an engine's device mesh, outermost first. Ranks that differ only in ``tp`` are adjacent."""

LETTERS = {
    "d": "data parallel",
    "r": "replicated data parallel",
    "p": "pipeline parallel",
    "v": "virtual pipeline stages per rank",
    "t": "tensor parallel",
    "c": "context parallel",
    "e": "expert parallel",
}
"""Letters of a layout, in the order in which a layout is printed."""

_LAYOUT = re.compile(r"^(?P<backend>[A-Za-z_][\w-]*):(?P<layout>.+)$")
_HYBRID = re.compile(r"^\(attn:(?P<attn>[a-z0-9]+)\|ffn:(?P<ffn>[a-z0-9]+)\)$")
_TERM = re.compile(r"([a-z])(\d+)")


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Parallel layout of one engine, written ``backend:letters``, such as ``fsdp:d4c2`` or ``megatron:d2p2t2``.

    The product of all degrees except ``v`` is the world size. ``e2d2`` has four ranks: dense layers have four data-parallel ranks, and the
    experts are sharded over two. Different layouts of attention and experts are written ``megatron:(attn:d1p2t4|ffn:d1p2e4)``, where the
    degrees of each side multiply to the world size.

    Attributes:
        backend: name of the engine in the entry point group ``areal.engines``.
        dp_shard: data-parallel degree of dense layers within a replica; parameters may be sharded over these ranks.
        dp_replicate: number of data-parallel replicas of the sharded model (HSDP).
        pp: pipeline-parallel degree.
        vpp: model chunks (virtual stages) per pipeline rank.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
        ep: expert-parallel degree.
        etp: tensor-parallel degree inside an expert; ``None`` means ``tp``.

    Raises:
        ValueError: a degree is not a positive integer, or the expert side does not divide the world.
    """

    backend: str
    dp_shard: int = 1
    dp_replicate: int = 1
    pp: int = 1
    vpp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        # 1. Every degree by itself.
        for name in ("dp_shard", "dp_replicate", "pp", "vpp", "tp", "cp", "ep", "etp"):
            degree = getattr(self, name)
            if degree is None and name == "etp":
                continue
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(f"ParallelDims.{name} = {degree!r}: a degree is an integer of at least 1")
        # 2. Degrees that need each other.
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"v{self.vpp} without a pipeline: virtual stages need p2 or more, or leave v out")
        # 3. The expert side must fill the same world as the dense side; the quotient is expert_dp.
        per_expert = self.pp * self.ep * self.expert_tp
        if self.world_size % per_expert:
            raise ValueError(
                f"the expert side takes pp * ep * etp = {self.pp} * {self.ep} * {self.expert_tp} = {per_expert} ranks, which does not "
                f"divide the dense side's {self.world_size}; choose ep so that it divides {self.world_size // self.pp}"
            )

    @property
    def dp(self) -> int:
        """Data-parallel degree: number of ranks over which the global batch is split."""
        return self.dp_shard * self.dp_replicate

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Number of ranks with the same shard of the experts."""
        return self.world_size // (self.pp * self.ep * self.expert_tp)

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.dp * self.pp * self.tp * self.cp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank of the world on the axes over which batches are split, ``pp``, ``dp``, ``cp`` and ``tp``."""
        places: dict[str, int] = {}
        # The last axis changes fastest, as in :data:`MESH_AXES`.
        for axis, degree in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)):
            rank, places[axis] = divmod(rank, degree)
        return places

    def of_processes(self, devices: int) -> ParallelDims:
        """Return the layout of the processes, if each of them is ``devices`` consecutive ranks of this layout.

        Its data-parallel degree is the number of groups of processes that get different data, replicas included. Experts are left out.

        Raises:
            ValueError: processes would be a part of a group of ranks and more than it at once, or ranks of several pipeline stages.
        """
        if devices == 1:
            return self
        degrees, rest = {"tp": self.tp, "cp": self.cp, "dp": self.dp}, devices
        # The last axis changes fastest, as in :data:`MESH_AXES`: a process has all of it before it has two of the next one.
        for axis, degree in degrees.items():
            common = math.gcd(degree, rest)
            if common < min(degree, rest):
                raise ValueError(
                    f"devices_per_process = {devices} with backend = '{self}': a process would have some of the ranks of {axis} = {degree} "
                    "and more than those; choose a number that divides the product of t, c and d, from t on"
                )
            degrees[axis], rest = degree // common, rest // common
        if rest > 1:
            raise ValueError(
                f"devices_per_process = {devices} with backend = '{self}': the layout has {self.dp * self.cp * self.tp} ranks for a process "
                "to compute; choose a smaller number, or a larger layout"
            )
        return ParallelDims(
            backend=self.backend,
            dp_shard=degrees["dp"],
            pp=self.pp,
            vpp=self.vpp,
            tp=degrees["tp"],
            cp=degrees["cp"],
        )

    def degrees(self) -> dict[str, int]:
        """Return degree by letter, as written in a layout without a separate expert side."""
        # Dense layers have dp_shard = d * e data-parallel ranks; the letters are written as factors.
        d = self.dp_shard // self.ep if self._is_plain else self.dp_shard
        return {"d": d, "r": self.dp_replicate, "p": self.pp, "v": self.vpp, "t": self.tp, "c": self.cp, "e": self.ep}

    @property
    def _is_plain(self) -> bool:
        """True if the layout can be written without a separate expert side."""
        return self.expert_tp == self.tp and self.dp_shard % self.ep == 0

    @classmethod
    def parse(cls, text: str) -> ParallelDims:
        """Parse a layout such as ``fsdp:d4c2`` or ``megatron:(attn:d1p2t4|ffn:d1p2e4)``. Spaces are ignored.

        Raises:
            ValueError: the text is not a layout. Names the wrong term and the valid ones.
        """
        match = _LAYOUT.match(text.strip().replace(" ", ""))
        if match is None:
            raise ValueError(f"backend = {text!r}: expected 'engine:layout', such as 'fsdp:d4c2' or 'megatron:d2p2t2'")
        backend, layout = match["backend"], match["layout"]
        # One side: e is a factor of the data-parallel degree of dense layers.
        hybrid = _HYBRID.match(layout)
        if hybrid is None:
            n = _parse_degrees(layout, text)
            return cls(
                backend=backend,
                dp_shard=n["d"] * n["e"],
                dp_replicate=n["r"],
                pp=n["p"],
                vpp=n["v"],
                tp=n["t"],
                cp=n["c"],
                ep=n["e"],
            )
        # Two sides, attention and experts.
        attn, ffn = _parse_degrees(hybrid["attn"], text), _parse_degrees(hybrid["ffn"], text)
        return _from_hybrid(backend, attn, ffn, text)

    def __str__(self) -> str:
        if self._is_plain:
            return f"{self.backend}:{_format_degrees(self.degrees())}"
        # The expert side is written with its own data-parallel degree, so e is not repeated on the attention side.
        attn = {**self.degrees(), "e": 1}
        ffn = {"d": self.expert_dp, "p": self.pp, "t": self.expert_tp, "e": self.ep}
        return f"{self.backend}:(attn:{_format_degrees(attn, always='d')}|ffn:{_format_degrees(ffn, always='d')})"

    def check_world(self, processes: int, devices: int = 1) -> None:
        """Raise unless the layout has exactly the ranks of the world.

        Args:
            processes: processes of the world.
            devices: ranks of each process.

        Raises:
            ValueError: the number of ranks differs. Suggests a layout that fits.
        """
        world_size = processes * devices
        if self.world_size == world_size:
            return
        # Suggest another data-parallel degree, or plain data parallelism if the other degrees do not divide the world.
        fixed = self.world_size // self.dp_shard
        if self._is_plain and world_size % (fixed * self.ep) == 0:
            fits = f"{self.backend}:{_format_degrees({**self.degrees(), 'd': world_size // (fixed * self.ep)})}"
        else:
            fits = f"{self.backend}:d{world_size}"
        world = (
            str(world_size)
            if devices == 1
            else f"{world_size}, {processes} processes with devices_per_process = {devices}"
        )
        raise ValueError(
            f"backend = '{self}' takes {self.world_size} ranks, but the world has {world}: "
            f"'{fits}' would fit, or start {self.world_size // devices} processes"
        )

    def check_supported(self, supported: frozenset[str]) -> None:
        """Raise if the layout needs parallelism that the engine does not support.

        Args:
            supported: letters that the engine supports.

        Raises:
            ValueError: names the letters that are not supported, and those that are.
        """
        # Degree 1 needs no support.
        extra = [letter for letter, n in self.degrees().items() if n > 1 and letter not in supported]
        if extra or not (self._is_plain or "e" in supported):
            names = ", ".join(f"{letter} ({LETTERS[letter]})" for letter in extra) or "a separate expert side"
            has = ", ".join(f"{letter} ({LETTERS[letter]})" for letter in LETTERS if letter in supported)
            raise ValueError(f"backend = '{self}': the {self.backend} engine has no {names}; it has {has}")


class RankPosition(ABC):
    """Position of a rank in the layout of its engine. Except ``dp_group``, it is known before the engine is initialized."""

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """Index of this rank's samples in the global batch, from 0 to ``dp_size - 1``."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """Number of data-parallel ranks over which the global batch is split."""

    @property
    @abstractmethod
    def dp_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that differ from this one only in ``dp_rank``."""

    @property
    @abstractmethod
    def is_main(self) -> bool:
        """True on exactly one rank per data-parallel coordinate. Use it to count or write a batch's outputs once."""


def _parse_degrees(layout: str, text: str) -> dict[str, int]:
    """Parse letters with numbers into a degree for each letter of :data:`LETTERS`; ``text`` is the full string, for errors."""
    # Terms must cover the string: findall skips characters that match nothing.
    terms = _TERM.findall(layout)
    if not terms or "".join(letter + number for letter, number in terms) != layout:
        raise ValueError(
            f"backend = {text!r}: {layout!r} is not a row of letters with numbers; the letters are "
            + ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
        )
    # Letters left out have degree 1.
    degrees: dict[str, int] = dict.fromkeys(LETTERS, 1)
    seen: set[str] = set()
    for letter, number in terms:
        if letter not in LETTERS:
            raise ValueError(
                f"backend = {text!r}: unknown letter {letter!r} in {layout!r}; the letters are {', '.join(LETTERS)}"
            )
        if letter in seen:
            raise ValueError(
                f"backend = {text!r}: {letter!r} stands twice in {layout!r}; write it once, with the whole degree"
            )
        if int(number) < 1:
            raise ValueError(
                f"backend = {text!r}: {letter}{number} is not a degree; leave {letter!r} out, or write {letter}1"
            )
        seen.add(letter)
        degrees[letter] = int(number)
    return degrees


def _from_hybrid(backend: str, attn: dict[str, int], ffn: dict[str, int], text: str) -> ParallelDims:
    """Combine the degrees of the attention side and the expert side into one layout."""
    # Each letter belongs to one side; both sides share the pipeline.
    if attn["e"] > 1 or ffn["c"] > 1 or ffn["r"] > 1 or ffn["v"] > 1:
        raise ValueError(f"backend = {text!r}: e belongs to the ffn side, and c, r and v to the attn side")
    if attn["p"] != ffn["p"]:
        raise ValueError(
            f"backend = {text!r}: both sides share the pipeline, but attn has p{attn['p']} and ffn has p{ffn['p']}"
        )
    # Both sides describe the same ranks.
    world = math.prod(attn[letter] for letter in "drptc")
    experts = math.prod(ffn[letter] for letter in "dpte")
    if world != experts:
        raise ValueError(
            f"backend = {text!r}: the attn side takes {world} ranks and the ffn side {experts}; make them equal"
        )
    return ParallelDims(
        backend=backend,
        dp_shard=attn["d"],
        dp_replicate=attn["r"],
        pp=attn["p"],
        vpp=attn["v"],
        tp=attn["t"],
        cp=attn["c"],
        ep=ffn["e"],
        etp=ffn["t"],
    )


def _format_degrees(degrees: dict[str, int], always: str = "") -> str:
    """Format degrees above 1, and the letters in ``always``; ``d1`` if there are none."""
    text = "".join(f"{letter}{n}" for letter, n in degrees.items() if n > 1 or letter in always)
    return text or "d1"
