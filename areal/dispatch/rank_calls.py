"""Functions that the ranks run, with the engine of a group, in the process of a rank.

The driver binds all arguments but the last two: the objects of the process, and the shard of the rank.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable, Iterator, Mapping
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


def initialize(
    engine: str, owner: str, config: TrainEngineConfig, spec: FinetuneSpec, rank_objects: RankObjects, _: Any
) -> RankLayout:
    """Create and initialize the engine of a group.

    Args:
        engine: name of the engine.
        owner: key of the group, which :func:`destroy` needs.
        config: configuration of the group.
        spec: specification of the run.
    """
    if engine in rank_objects.by_name:
        raise RuntimeError(
            f"the engine is already initialized: destroy it, or give another group a name that is not "
            f"{engine!r}: WorkerGroup(name=...)"
        )
    created = create_engine(_with_rank_spec(config))
    created.initialize(spec)
    rank_objects.owners[engine] = owner
    rank_objects.by_name[engine] = created
    return RankLayout(created.dp_rank, created.is_main, rules_of(created))


def of_a_rank(spec: MicroBatchSpec) -> MicroBatchSpec:
    """Return the rules of a rank. The driver divides batches, so that equal shards are equal samples, and no mistake."""
    return spec.model_copy(update={"equal_batches": "allow"})


def _with_rank_spec(config: TrainEngineConfig) -> TrainEngineConfig:
    """Return the configuration of a rank."""
    supported: frozenset[str] = getattr(engine_class(config.dims.backend), "supported_options", frozenset())
    if not supported & {"mb_spec", "mb_spec.equal_batches"}:
        return config
    return config.model_copy(update={"mb_spec": of_a_rank(config.mb_spec)})


def destroy(engine: str, owner: str, rank_objects: RankObjects, _: Any) -> None:
    """Destroy the engine of a group, with everything that its calls have left. Nothing happens if the engine is another group's."""
    if rank_objects.owners.get(engine) != owner:
        return
    del rank_objects.owners[engine]
    created = rank_objects.by_name.pop(engine, None)
    for key in [key for key in rank_objects.by_name if key.startswith(f"{engine}/")]:
        del rank_objects.by_name[key]
    if created is not None:
        created.destroy()


@dataclass(frozen=True, slots=True)
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
        if self.returned is not Returned.STEP:
            return value
        # The wire format packs the tensors of a tuple, but not those inside a step. The driver reads one step.
        return dataclasses.replace(value, outputs={}) if engine.dp_rank == 0 else None, value.outputs


def call_function(
    engine: str, function: Handle, returned: Returned, rank_objects: RankObjects, shard: Handle | None
) -> Any:
    """Call the caller's function with the engine and the shard of the rank."""
    own = rank_objects.engine(engine)
    value = function.get()(own, None if shard is None else shard.get())
    return value if is_kept(returned, rank_objects, own) else None


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


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that was shipped."""

    handle: Handle

    def get(self) -> Any:
        return self.handle.get()


# ---- micro-batches


def keep_microbatches(
    engine: str, key: str, mb_spec: MicroBatchSpec | None, rank_objects: RankObjects, shard: Handle
) -> MicroBatchList | None:
    """Make the micro-batches of a batch and keep them under a key. Returns their layout."""
    own = rank_objects.engine(engine)
    given = {} if mb_spec is None else {"mb_spec": mb_spec}
    mbs = rank_objects.by_name[key] = own.microbatches(shard.get(), **given)
    return _without_tensors(mbs) if own.is_main else None


def on_microbatches(verb: Verb, key: str, rank_objects: RankObjects, _: Any) -> Any:
    """Call a verb with the micro-batches under a key."""
    mbs = rank_objects.by_name.get(key)
    if mbs is None:
        raise ValueError("mbs is not on the ranks of this group: pass what its microbatches() returned")
    arguments = {**verb.arguments, "mbs": Argument(LocalHandle(mbs))}
    return dataclasses.replace(verb, arguments=arguments)(rank_objects, None)


def _without_tensors(mbs: MicroBatchList) -> MicroBatchList:
    """Return the layout of micro-batches, without what the ranks compute with."""
    return dataclasses.replace(
        mbs,
        mbs=tuple(
            dataclasses.replace(
                mb,
                data=type(mb.data)({}, mb.cu_seqlens.cpu()),
                cu_seqlens=mb.cu_seqlens.cpu(),
                tree=None,
                layout=None,
                images=None,
            )
            for mb in mbs
        ),
    )


def drop(keys: tuple[str, ...], rank_objects: RankObjects, _: Any) -> None:
    """Drop objects of earlier calls."""
    for key in keys:
        rank_objects.by_name.pop(key, None)


# ---- streams and contexts


class TensorStream:
    """A stream of tensors that is read in parts.

    Args:
        tensors: all ranks see tensors of the same sizes.

    Attributes:
        ended: True once the last tensor was read.
    """

    def __init__(self, tensors: Iterable[NamedTensor]) -> None:
        self._tensors = iter(tensors)
        self._first: NamedTensor | None = None  # of the next part
        self.ended = False

    def part(self, nbytes: int) -> Iterator[NamedTensor]:
        """Iterate over the next tensors: at most ``nbytes`` bytes, or one tensor."""
        total = 0
        while (each := self._first or next(self._tensors, None)) is not None:
            self._first = each
            if total and total + each.tensor.nbytes > nbytes:
                return
            total, self._first = total + each.tensor.nbytes, None
            yield each
        self.ended = True


def open_stream(verb: Verb, key: str, rank_objects: RankObjects, _: Any) -> None:
    """Begin to iterate over tensors."""
    member = attrgetter(verb.path)(rank_objects.engine(verb.engine))
    rank_objects.by_name[key] = TensorStream(member(**resolved(verb.arguments)))


def next_tensors(key: str, nbytes: int, rank_objects: RankObjects, _: Any) -> tuple[list[NamedTensor], bool]:
    """Iterate over the next part of a stream. Rank 0 returns its tensors, and whether the stream has ended.

    Args:
        key: of the stream.
        nbytes: as in :meth:`TensorStream.part`.
    """
    chunk: list[NamedTensor] = []
    stream: TensorStream = rank_objects.by_name[key]
    for name, tensor in stream.part(nbytes):
        if rank_objects.rank == 0:
            # A copy, because the next tensor may reuse the memory.
            chunk.append(NamedTensor(name, tensor.detach().to("cpu", copy=True)))
    if stream.ended:
        del rank_objects.by_name[key]
    return chunk, stream.ended


def enter_context(verb: Verb, key: str, ranks: frozenset[int] | None, rank_objects: RankObjects, _: Any) -> Any:
    """Enter a context of the engine, which stays open under a key. Returns its value, if the driver reads it.

    Args:
        ranks: ranks that enter it; ``None`` for all.
    """
    if ranks is not None and rank_objects.rank not in ranks:
        return None
    member = attrgetter(verb.path)(rank_objects.engine(verb.engine))
    context: AbstractContextManager[Any] = member(**resolved(verb.arguments))
    value = context.__enter__()
    rank_objects.by_name[key] = context
    return value if verb.returned is Returned.FOLDERS else None


def exit_context(key: str, rank_objects: RankObjects, _: Any) -> None:
    """Leave a context."""
    context = rank_objects.by_name.pop(key, None)
    if context is not None:
        context.__exit__(None, None, None)


# ---- checkpoints


def sees(path: Path, rank_objects: RankObjects, _: Any) -> tuple[bool, str]:
    """Return whether the process sees a file, and the name of its host."""
    return path.exists(), socket.gethostname()


@dataclass
class CarriedState:
    """State of an object of the driver, saved and loaded in its place."""

    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def load(
    engine: str, meta: SaveLoadMeta, rank_objects: RankObjects, _: Any
) -> tuple[int, dict[str, dict[str, Any]]] | None:
    """Load a checkpoint. Returns the version, and the states of the driver's objects."""
    own = rank_objects.engine(engine)
    carried = {name: CarriedState() for name in meta.stateful}
    own.load(dataclasses.replace(meta, stateful=dict(carried)))
    return (own.version, {name: each.state for name, each in carried.items()}) if rank_objects.rank == 0 else None


# ---- weight transports


def make_transport(engine: str, make: Handle, key: str, rank_objects: RankObjects, _: Any) -> None:
    """Make a weight transport on every rank."""
    rank_objects.by_name[key] = make.get()(rank_objects.engine(engine))


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
            make_transport(self.engine, self.make, self.key, rank_objects, None)
        if self.method == "send":
            arguments["source"] = rank_objects.engine(self.engine)
        value = getattr(rank_objects.by_name[self.key], self.method)(**arguments)
        return value if rank_objects.rank == 0 else None
