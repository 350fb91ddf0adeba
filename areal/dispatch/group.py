"""A group of ranks behind one handle, which is itself an engine with one data-parallel shard."""

from __future__ import annotations

import dataclasses
import inspect
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from areal.api import (
    FinetuneSpec,
    Finished,
    NamedTensor,
    Pending,
    SaveLoadMeta,
    SelectName,
    TrainEngine,
    TrainEngineConfig,
    WeightTransport,
)
from areal.api.engine import BatchInput
from areal.dispatch import rank_calls
from areal.dispatch.calls import Calls, at, rank_0
from areal.dispatch.executor import Executor, InProcess
from areal.dispatch.layouts import count_ranks, warn_of_groups_over_nodes
from areal.dispatch.rank_calls import CarriedState, RankLayout
from areal.dispatch.remote_transport import GroupTransport
from areal.dispatch.shared_devices.place import Place
from areal.dispatch.shared_devices.uses import Use
from areal.dispatch.stored_samples import put_samples
from areal.dispatch.table import TABLE, DispatchedVerbs, GroupAdapters, Returned
from areal.engine.options import engine_config, process_dims
from areal.engine.registry import engine_class
from areal.utils.distributed import ControlPlane

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Mapping[str, Any])


class WorkerGroup(DispatchedVerbs):
    """An engine whose ranks run elsewhere. The driver sees one data-parallel shard: it passes global batches, and gets global results.

    :data:`~areal.dispatch.table.TABLE` says for each member what the ranks receive and what the driver returns. A batch is divided by the cost
    of its samples. It may have any number of samples, also fewer than there are data-parallel coordinates.

    Args:
        config: configuration of the engine on every rank.
        executor: processes of the ranks, which several groups may share. Default: this process, for a layout of one rank.
        name: name of the engine in the processes, different for each group of an executor.
        shared_folder: folder of checkpoints, on a file system that all nodes share. It is checked when the engine is initialized. By default
            the first :meth:`save` to a folder checks it, before anything is written.

    Raises:
        ValueError: the layout and the executor differ in size, the engine does not support the layout or an option, or the name has a slash.
    """

    def __init__(
        self,
        config: TrainEngineConfig,
        executor: Executor | None = None,
        *,
        name: str = "engine",
        shared_folder: str | Path | None = None,
    ) -> None:
        if not name or "/" in name:
            raise ValueError(f"name = {name!r}: it must not be empty, and have no slash")
        self._executor = executor or InProcess()
        self.config = engine_config(engine_class(config.dims.backend), config)
        self.dims = config.dims
        # The layout of the processes: a process of some engines is several ranks.
        self._processes = process_dims(engine_class(config.dims.backend), self.config)
        if self._processes.world_size != self._executor.size:
            raise ValueError(
                f"TrainEngineConfig.backend = {config.backend!r} has {count_ranks(self.dims, self._processes)}, and the executor "
                f"{self._executor.size} processes: give both the same number"
            )
        self.device = torch.device("cpu")
        self.control = ControlPlane(alone=True)
        self.version = 0
        self._calls = Calls(self._executor, name, self.config)
        self._shared_folder = shared_folder
        self._spec: FinetuneSpec | None = None
        # Distinguishes its engine on the ranks from that of another group of the same name.
        self._owner = uuid.uuid4().hex
        # Generation of the processes that may have the engine, also after an initialization that failed or was interrupted.
        self._sent_to: int | None = None
        self._checkpoints: list[SaveLoadMeta] = []

    # ---- any function, any verb

    def run(
        self, fn: Callable[[TrainEngine, Any], R], batch: BatchInput | None = None, *, use: Use | None = Use.ALL
    ) -> list[R]:
        """Call ``fn(engine, shard)`` on every rank, the primitive under all verbs.

        Args:
            fn: function that pickles by cloudpickle. Its result must pickle. Verbs of the engine are collective inside.
            batch: divided like that of a verb; ``shard`` is ``None`` without.
            use: on shared devices, the use of the engine, by default that of all its state. ``None`` for a function that needs no tensor.

        Returns:
            The results of all ranks, by rank.

        Raises:
            ValueError: the function cannot be sent, or the batch is invalid.
        """
        return self.start_run(fn, batch, use=use).result()

    def start_run(
        self, fn: Callable[[TrainEngine, Any], R], batch: BatchInput | None = None, *, use: Use | None = Use.ALL
    ) -> Pending[list[R]]:
        """Start :meth:`run` and return its future."""
        self._calls.require_rank_layouts()
        shards = None if batch is None else self._calls.shards(batch)[1]
        return self._calls.start("run", self._calls.function(fn, Returned.RANKS), list, shards, use=use)

    def map(self, fn: Callable[[TrainEngine, Any], Any], batch: BatchInput, *, use: Use | None = Use.ALL) -> Any:
        """Call ``fn(engine, shard)`` on every rank, and return results by sample, as :meth:`forward_batch` does.

        Args:
            fn: as in :meth:`run`. Returns a list with an item for each sample of the shard (or for a padded batch, tensors ``[B_i, ...]``), or
                a dict of these.
            batch: divided like that of a verb.
            use: as in :meth:`run`.
        """
        plan, shards = self._calls.shards(batch)
        mains, work = self._calls.mains(), self._calls.function(fn, Returned.SAMPLES)
        return self._calls.start("map", work, lambda values: plan.merge(at(mains, values)), shards, use=use).result()

    def start(self, verb: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start a verb and return its future: ``group.start(TrainEngine.train_batch, batch, loss)``.

        Calls run on the ranks in the order in which they were started.

        Args:
            verb: a method of :class:`~areal.api.TrainEngine`, or of this group.
            args, kwargs: its arguments.

        Raises:
            ValueError: the verb returns no future (streams, contexts and the driver's own members), or an argument cannot be sent.
        """
        name = getattr(verb, "__name__", repr(verb))
        method = getattr(TrainEngine, name, None) if name in TABLE else None
        if not callable(method):
            raise ValueError(
                f"verb = {name}: pass a method of TrainEngine; run(fn) and start_run(fn) call other functions"
            )
        # The signature of a bound method, such as group.train_batch, has no self.
        arguments = inspect.signature(method).bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        return self._start(name, arguments)

    def _start(self, name: str, arguments: dict[str, Any]) -> Pending[Any]:
        special: dict[str, Callable[..., Pending[Any]]] = {
            "initialize": self._start_initialize,
            "destroy": self._start_destroy,
            "save": self._start_save,
            "load": self._start_load,
            "set_version": self._start_set_version,
        }
        return special[name](**arguments) if name in special else self._calls.start_member(name, arguments)

    def _call(self, name: str, /, **arguments: Any) -> Any:
        return self._start(name, arguments).result()

    # ---- life cycle

    def initialize(self, spec: FinetuneSpec) -> None:
        self._call("initialize", spec=spec)
        if self._shared_folder is not None:
            self._calls.check_shared(self._shared_folder)

    def _start_initialize(self, spec: FinetuneSpec) -> Pending[None]:
        if self._calls.started:
            raise RuntimeError("the engine is already initialized: destroy it, or make another group")
        self._spec, self.version, self._sent_to = spec, 0, self._executor.generation
        work = partial(rank_calls.initialize, self._calls.name, self._owner, self.config, spec)
        return self._calls.start("initialize", work, self._initialized, use=TABLE["initialize"].use_with({}))

    def _initialized(self, rank_layouts: list[RankLayout]) -> None:
        self._calls.take_rank_layouts(rank_layouts)
        warn_of_groups_over_nodes(self.dims, self._processes, self._executor.nodes)

    def destroy(self) -> None:
        self._call("destroy")

    def _start_destroy(self) -> Pending[None]:
        # Nothing is left where the processes are lost.
        if self._executor.lost is not None or self._sent_to != self._executor.generation:
            self._calls.leave_devices()
            return Finished(None)
        self._calls.take_rank_layouts(None)
        work = partial(rank_calls.destroy, self._calls.name, self._owner)
        pending = self._calls.start("destroy", work, lambda _: self._calls.leave_devices())
        self._sent_to = None
        return pending

    def restart(self, layout: str | None = None) -> None:
        """Go on after the loss of a rank, from the last checkpoint that this group saved or loaded, if there is one.

        The processes are replaced by new ones. With a layout of fewer ranks, those that are left after a loss go on, if they still reply.
        Groups that share the processes are restarted one by one. The processes are replaced once.

        Args:
            layout: engine and layout to go on with, such as ``"fsdp:d6"``. Defaults to the present ones.

        Raises:
            RuntimeError: the group was never initialized.
            ValueError: the layout is not possible: for the engine with these options, for the executor, or for another group that has restarted
                the processes. Nothing was changed.
        """
        if self._spec is None:
            raise RuntimeError("the group was never initialized: call initialize(FinetuneSpec(...))")
        config = self.config if layout is None else self._on_layout(layout)
        processes = process_dims(engine_class(config.dims.backend), config)
        size = processes.world_size
        if self._executor.lost is not None or self._calls.generation == self._executor.generation:
            self._executor.restart(size)
            self._calls.take_rank_layouts(None)
        elif size != self._executor.size:
            raise ValueError(
                f"layout = {str(config.dims)!r} has {count_ranks(config.dims, processes)}, and the processes that another group has restarted "
                f"are {self._executor.size}: restart this group on a layout of as many"
            )
        self.config, self.dims, self._processes, self._calls.config = config, config.dims, processes, config
        if self._calls.place is not None:
            self._calls.place.renew()
        self.initialize(self._spec)
        # An asynchronous save that a loss has interrupted was never published.
        published = [meta for meta in self._checkpoints if Path(meta.path).exists()]
        for meta in (published or [meta for meta in self._checkpoints if not meta.asynchronous])[-1:]:
            self.load(meta)

    def _on_layout(self, layout: str) -> TrainEngineConfig:
        """Return the configuration with another layout.

        Raises:
            ValueError: the engine does not support it, or the group is on shared devices.
        """
        if self._calls.place is not None:
            raise ValueError(f"layout = {layout!r} on shared devices: their models keep their layouts, leave it out")
        fields = {name: getattr(self.config, name) for name in self.config.model_fields_set}
        config = TrainEngineConfig(**{**fields, "backend": layout})
        return engine_config(engine_class(config.dims.backend), config)

    def _remember(self, meta: SaveLoadMeta) -> None:
        """Note a checkpoint from which :meth:`restart` may go on."""
        if meta.weight_format == "dcp":
            self._checkpoints = [*self._checkpoints[-1:], meta]

    def put(self, samples: list[S]) -> list[S]:
        return put_samples(samples, self._executor)

    # ---- position in the layout: that of the driver

    @property
    def dp_rank(self) -> int:
        return 0

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def dp_group(self) -> NoReturn:
        raise RuntimeError(
            "a group has no process group in the driver, which has the only data-parallel shard: sum with global_sum(x), or use "
            "engine.dp_group in a function of run(fn)"
        )

    @property
    def is_main(self) -> bool:
        return True

    def global_sum(self, x: Tensor) -> Tensor:
        return x.detach().clone()

    def set_version(self, version: int) -> None:
        self._call("set_version", version=version)

    def _start_set_version(self, version: int) -> Pending[None]:
        self.version = version
        return self._calls.start(
            "set_version", self._calls.verb("set_version", {"version": version}, Returned.RANK_0), rank_0
        )

    # ---- weights and checkpoints

    def named_tensors(
        self, *, dtype: torch.dtype | None = None, select: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        return self._calls.stream("named_tensors", dtype=dtype, select=select)

    def local_tensors(self, *, dtype: torch.dtype | None = None, select: SelectName | None = None) -> NoReturn:
        raise RuntimeError(
            "the parts of the weights are on the ranks of a group: use engine.local_tensors() in a function of run(fn)"
        )

    def named_gradients(self) -> Iterator[NamedTensor]:
        return self._calls.stream("named_gradients")

    def transport(self, make: Callable[[TrainEngine], WeightTransport]) -> GroupTransport:
        """Make a weight transport on every rank. Its ``send(group, version)`` sends the weights from the ranks.

        Args:
            make: called on every rank with its engine, such as ``lambda engine: DiskTransport(engine.control, folder)``.
        """
        self._calls.require_rank_layouts()
        key, handle = self._calls.new_key("transport"), self._executor.ship(make, "make")
        self._calls.run("transport", partial(rank_calls.make_transport, self._calls.name, handle, key))
        return GroupTransport(self._calls, key, handle, self)

    def _start_save(self, meta: SaveLoadMeta) -> Pending[None]:
        self._calls.require_rank_layouts()
        meta = _with_absolute_path(meta)
        self._calls.check_shared(Path(meta.path).parent)
        # The driver's objects stay here: their state travels.
        carried = {name: CarriedState(stateful.state_dict()) for name, stateful in meta.stateful.items()}
        sent = dataclasses.replace(meta, stateful=dict(carried))
        use, verb = TABLE["save"].use_with({"meta": meta}), self._calls.verb("save", {"meta": sent}, Returned.RANK_0)
        return self._calls.start("save", verb, lambda _: self._remember(meta), use=use)

    def _start_load(self, meta: SaveLoadMeta) -> Pending[None]:
        meta = _with_absolute_path(meta)

        def finish(values: list[Any]) -> None:
            self.version, states = values[0]
            for name, state in states.items():
                meta.stateful[name].load_state_dict(state)
            self._remember(meta)

        self._calls.require_rank_layouts()
        named = dataclasses.replace(meta, stateful={name: CarriedState() for name in meta.stateful})
        work = partial(rank_calls.load, self._calls.name, named)
        return self._calls.start("load", work, finish, use=TABLE["load"].use_with({}))

    # ---- memory

    def share_devices(self, place: Place | None) -> None:
        """Begin the use of each verb on devices that are shared with others. :meth:`~areal.dispatch.SharedDevices.add` calls it."""
        self._calls.place = place

    # ---- adapters

    @property
    def adapters(self) -> GroupAdapters:
        if self.config.lora is None:
            raise RuntimeError("the engine has no adapters: set TrainEngineConfig.lora=LoRAConfig(...) to train some")
        return GroupAdapters(self._call, self._calls.stream)

    @contextmanager
    def reference(self) -> Iterator[None]:
        with self._calls.context("reference", {}):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._calls.context("evaluating", {}):
            yield

    @contextmanager
    def profile(
        self,
        folder: str | Path,
        *,
        memory: bool = True,
        stacks: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> Iterator[dict[int, Path]]:
        """Profile all ranks, or those in ``ranks``; see :meth:`areal.api.TrainEngine.profile`.

        Files are written where the ranks run. The context gives the path there, by rank.
        """
        options = {"folder": folder, "memory": memory, "stacks": stacks}
        with self._calls.context("profile", options, ranks) as by_rank:
            yield {rank: path for folders in by_rank if folders for rank, path in folders.items()}


def _with_absolute_path(meta: SaveLoadMeta) -> SaveLoadMeta:
    """Return a checkpoint with the path of the driver, whose directory may be another one than that of the ranks."""
    return dataclasses.replace(meta, path=Path(meta.path).absolute())
