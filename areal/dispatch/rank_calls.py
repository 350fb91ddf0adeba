"""Functions that the ranks run, with the engine of a group, in the process of a rank."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from areal.api import FinetuneSpec, MicroBatchList, MicroBatchSpec, NamedTensor, SaveLoadMeta, TrainEngineConfig
from areal.dispatch.executor import Handle, LocalHandle, RankObjects
from areal.dispatch.table import Returned
from areal.engine.batch_rules import BatchRules, rules_of
from areal.engine.registry import create_engine, engine_class


@dataclass(frozen=True)
class RankLayout:
    """The place of a rank in the layout.

    Attributes:
        dp_rank: data-parallel coordinate.
        is_main: the rank returns the outputs of its coordinate.
        rules: rules for batches, equal on all ranks; ``None`` if only the engine itself can check them.
    """

    dp_rank: int
    is_main: bool
    rules: BatchRules | None


@dataclass(frozen=True)
class Initialize:
    """Creates and initializes the engine of a group. Returns the rank's :class:`RankLayout`."""

    engine: str
    config: TrainEngineConfig
    spec: FinetuneSpec

    def __call__(self, rank_objects: RankObjects, _: Any) -> RankLayout:
        if self.engine in rank_objects.by_name:
            raise RuntimeError(
                f"the engine is already initialized: destroy it, or give another group a name that is not "
                f"{self.engine!r}: WorkerGroup(name=...)"
            )
        engine = create_engine(_with_rank_spec(self.config))
        engine.initialize(self.spec)
        rank_objects.by_name[self.engine] = engine
        return RankLayout(engine.dp_rank, engine.is_main, rules_of(engine))


def of_a_rank(spec: MicroBatchSpec) -> MicroBatchSpec:
    """Return the rules of a rank. The driver divides batches, so that equal shards are equal samples, and no mistake."""
    return spec.model_copy(update={"equal_batches": "allow"})


def _with_rank_spec(config: TrainEngineConfig) -> TrainEngineConfig:
    """Return the configuration of a rank."""
    supported: frozenset[str] = getattr(engine_class(config.dims.backend), "supported_options", frozenset())
    if not supported & {"mb_spec", "mb_spec.equal_batches"}:
        return config
    return config.model_copy(update={"mb_spec": of_a_rank(config.mb_spec)})


@dataclass(frozen=True)
class Destroy:
    """Destroys the engine of a group, with everything that its calls have left."""

    engine: str

    def __call__(self, rank_objects: RankObjects, _: Any) -> None:
        engine = rank_objects.by_name.pop(self.engine, None)
        for key in [key for key in rank_objects.by_name if key.startswith(f"{self.engine}/")]:
            del rank_objects.by_name[key]
        if engine is not None:
            engine.destroy()


@dataclass(frozen=True)
class Verb:
    """Calls a member of the engine. Its arguments are values or handles."""

    engine: str
    path: str
    arguments: Mapping[str, Any]
    returned: Returned

    def __call__(self, rank_objects: RankObjects, shard: Handle | None) -> Any:
        engine = rank_objects.engine(self.engine)
        arguments = resolved(self.arguments)
        if shard is not None:
            arguments["batch"] = shard.get()
        member = attrgetter(self.path)(engine)
        value = member(**arguments) if callable(member) else member
        if not is_kept(self.returned, rank_objects, engine):
            return None
        # The wire format packs the tensors of a tuple, but not those inside a step.
        return (dataclasses.replace(value, outputs={}), value.outputs) if self.returned is Returned.STEP else value


@dataclass(frozen=True)
class Function:
    """Calls the caller's function with the engine and the shard of the rank."""

    engine: str
    function: Handle
    returned: Returned

    def __call__(self, rank_objects: RankObjects, shard: Handle | None) -> Any:
        engine = rank_objects.engine(self.engine)
        value = self.function.get()(engine, None if shard is None else shard.get())
        return value if is_kept(self.returned, rank_objects, engine) else None


def is_kept(returned: Returned, rank_objects: RankObjects, engine: Any) -> bool:
    """Return whether the driver reads the result of this rank."""
    if returned is Returned.RANKS:
        return True
    if returned in (Returned.STEP, Returned.SAMPLES, Returned.MICROBATCHES, Returned.LAYOUT):
        return engine.is_main
    return rank_objects.rank == 0


def resolved(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the values of handles."""
    return {name: value.get() if isinstance(value, Argument) else value for name, value in arguments.items()}


@dataclass(frozen=True)
class Argument:
    """An argument that was shipped."""

    handle: Handle

    def get(self) -> Any:
        return self.handle.get()


# ---- micro-batches


@dataclass(frozen=True)
class Keep:
    """Makes the micro-batches of a batch and keeps them under a key. Returns their layout."""

    engine: str
    key: str
    mb_spec: MicroBatchSpec | None

    def __call__(self, rank_objects: RankObjects, shard: Handle) -> MicroBatchList | None:
        engine = rank_objects.engine(self.engine)
        given = {} if self.mb_spec is None else {"mb_spec": self.mb_spec}
        mbs = rank_objects.by_name[self.key] = engine.microbatches(shard.get(), **given)
        return _without_tensors(mbs) if engine.is_main else None


@dataclass(frozen=True)
class OnMicroBatches:
    """Calls a verb with the micro-batches under a key."""

    verb: Verb
    key: str

    def __call__(self, rank_objects: RankObjects, _: Any) -> Any:
        mbs = rank_objects.by_name.get(self.key)
        if mbs is None:
            raise ValueError("mbs is not on the ranks of this group: pass what its microbatches() returned")
        return dataclasses.replace(self.verb, arguments={**self.verb.arguments, "mbs": Argument(LocalHandle(mbs))})(
            rank_objects, None
        )


def _without_tensors(mbs: MicroBatchList) -> MicroBatchList:
    """Return the layout of micro-batches, without what the ranks compute with."""
    return dataclasses.replace(
        mbs,
        mbs=tuple(
            dataclasses.replace(
                mb, data=type(mb.data)({}, mb.cu_seqlens.cpu()), cu_seqlens=mb.cu_seqlens.cpu(), tree=None, layout=None
            )
            for mb in mbs
        ),
    )


@dataclass(frozen=True)
class Drop:
    """Drops objects of earlier calls."""

    keys: tuple[str, ...]

    def __call__(self, rank_objects: RankObjects, _: Any) -> None:
        for key in self.keys:
            rank_objects.by_name.pop(key, None)


# ---- streams and contexts


@dataclass(frozen=True)
class OpenStream:
    """Begins to iterate over tensors."""

    verb: Verb
    key: str

    def __call__(self, rank_objects: RankObjects, _: Any) -> None:
        member = attrgetter(self.verb.path)(rank_objects.engine(self.verb.engine))
        rank_objects.by_name[self.key] = iter(member(**resolved(self.verb.arguments)))


@dataclass(frozen=True)
class NextTensors:
    """Iterates over the next tensors, up to a number of bytes. Rank 0 returns them, and whether the stream has ended.

    Attributes:
        key: of the stream.
        nbytes: bytes after which the chunk ends. All ranks see the same tensors, and end it at the same one.
    """

    key: str
    nbytes: int

    def __call__(self, rank_objects: RankObjects, _: Any) -> tuple[list[NamedTensor], bool]:
        chunk: list[NamedTensor] = []
        total = 0
        for name, tensor in rank_objects.by_name[self.key]:
            total += tensor.nbytes
            if rank_objects.rank == 0:
                # A copy, because the next tensor may reuse the memory.
                chunk.append(NamedTensor(name, tensor.detach().to("cpu", copy=True)))
            if total >= self.nbytes:
                return chunk, False
        del rank_objects.by_name[self.key]
        return chunk, True


@dataclass(frozen=True)
class EnterContext:
    """Enters a context of the engine, which stays open under a key. Returns its value, if the driver reads it.

    Attributes:
        ranks: ranks that enter it; ``None`` for all.
    """

    verb: Verb
    key: str
    ranks: frozenset[int] | None = None

    def __call__(self, rank_objects: RankObjects, _: Any) -> Any:
        if self.ranks is not None and rank_objects.rank not in self.ranks:
            return None
        member = attrgetter(self.verb.path)(rank_objects.engine(self.verb.engine))
        context: AbstractContextManager[Any] = member(**resolved(self.verb.arguments))
        value = context.__enter__()
        rank_objects.by_name[self.key] = context
        return value if self.verb.returned is Returned.FOLDERS else None


@dataclass(frozen=True)
class ExitContext:
    """Leaves a context."""

    key: str

    def __call__(self, rank_objects: RankObjects, _: Any) -> None:
        context = rank_objects.by_name.pop(self.key, None)
        if context is not None:
            context.__exit__(None, None, None)


# ---- checkpoints


@dataclass(frozen=True)
class Sees:
    """Returns whether the process sees a file, and the name of its host."""

    path: Path

    def __call__(self, rank_objects: RankObjects, _: Any) -> tuple[bool, str]:
        return self.path.exists(), socket.gethostname()


@dataclass
class CarriedState:
    """State of an object of the driver, saved and loaded in its place."""

    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@dataclass(frozen=True)
class Load:
    """Loads a checkpoint. Returns the version, and the states of the driver's objects."""

    engine: str
    meta: SaveLoadMeta

    def __call__(self, rank_objects: RankObjects, _: Any) -> tuple[int, dict[str, dict[str, Any]]] | None:
        engine = rank_objects.engine(self.engine)
        carried = {name: CarriedState() for name in self.meta.stateful}
        engine.load(dataclasses.replace(self.meta, stateful=dict(carried)))
        return (
            (engine.version, {name: each.state for name, each in carried.items()}) if rank_objects.rank == 0 else None
        )


# ---- weight transports


@dataclass(frozen=True)
class MakeTransport:
    """Makes a weight transport on every rank."""

    engine: str
    make: Handle
    key: str

    def __call__(self, rank_objects: RankObjects, _: Any) -> None:
        rank_objects.by_name[self.key] = self.make.get()(rank_objects.engine(self.engine))


@dataclass(frozen=True)
class OnTransport:
    """Calls a method of a transport; ``send`` gets the engine as its source. A process that was restarted makes the transport again."""

    engine: str
    key: str
    make: Handle
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, rank_objects: RankObjects, _: Any) -> Any:
        arguments = resolved(self.arguments)
        if self.key not in rank_objects.by_name:
            MakeTransport(self.engine, self.make, self.key)(rank_objects, None)
        if self.method == "send":
            arguments["source"] = rank_objects.engine(self.engine)
        value = getattr(rank_objects.by_name[self.key], self.method)(**arguments)
        return value if rank_objects.rank == 0 else None
