"""The tests that ``.ci/run`` leaves to ``make test``: the marker ``thorough``, set by rules over all tests that were collected.

1. Four ranks run three training steps on products of two kinds of parallelism in which each kind occurs. Further layouts of four ranks
   (:data:`FOUR_RANKS`) and other properties of a step (:data:`PRODUCTS`) are shown on two ranks.
2. A further mode of a kind of parallelism (:data:`MODES`) runs the three steps, and cells of the grid unless it is a pipeline schedule.
3. Of the grid, two cells for each layout (of some engines :data:`CELLS`), at most one of them in a lower precision: rounding differs
   by layout, errors show in float64. Each value of each factor occurs in a cell.
4. Of a test on ranks with several parametrizations, combinations in which each value occurs. The others are their product.
5. Of any other test on ranks, :data:`CASES` cases.
6. Never a test that a planted bug names: the run plants them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pytest

from areal.tests.mutants.finding import GRID, named_tests, short_id
from areal.tests.mutants.registry import MUTANTS

if TYPE_CHECKING:  # every session would import the grid's models
    from areal.tests.grid.layouts import Cell

PRODUCTS = (
    "megatron",
    "test_grid",
    "test_steps",
    "test_faults",
    "test_bad_losses",
    "test_eval_between_calls",
    "test_outputs",
    "test_memory",
    "test_moe",
)
"""Tests whose cases on four ranks are thorough."""

FOUR_RANKS = (
    *("fsdp:c4", "fsdp:d4", "fsdp:p4", "megatron:c4"),  # one kind of parallelism
    *("fsdp:c2t2-gather_kv", "fsdp:d2c2-gather_kv"),  # the second mode of a product
    *("fsdp:r2c2", "fsdp:r2e2"),  # replicas of what ``r2d2`` and the layouts of two ranks show
    *("fsdp:d2e2", "fsdp:c2e2", "fsdp:d2p2", "fsdp:c2p2", "fsdp:p2t2"),  # each kind meets others in what is left
    *("megatron:c2p2", "megatron:d2p2"),
    *("jax:d2t2", "jax:r2c2"),
)
"""Layouts of four ranks whose three training steps are thorough."""

STEPS = "three_steps"
"""The test that runs three training steps on every layout."""

SCHEDULES = ("fsdp:p2-GPipe", "fsdp:p2v2-Interleaved1F1B")
"""Pipeline schedules that are thorough except in the three steps."""

MODES = (*SCHEDULES, "fsdp:p2v2-InterleavedZeroBubble", "c2-gather_kv", "t2-no_sp", "(attn:d1t2|ffn:d1e2)")
"""Modes that are thorough except in the three steps and the grid: beside each, another mode runs the same code of a test."""

CELLS = {"jax": 1}
"""Cells of the grid for each layout of an engine that are not thorough, where they are not two: JAX compiles for each of them."""

COMPILED = ("jax:d2", "jax:t2", "jax:c2", "jax:e2", "jax:(attn")
"""Layouts of JAX whose three training steps are thorough: the optimizer of ``d1`` compiles the same function."""

CASES = 2
"""Cases of a test on ranks that are not thorough, unless each is about something else (:data:`EACH`)."""

EACH = (GRID, STEPS, "test_options")
"""Tests whose cases are not counted."""

ELSEWHERE = (
    "megatron:p2-hf",  # saves that are killed while the code of the FSDP engine writes
    "test_killed_server_raises_within_the_deadline[vllm]",
    "test_requests_fail_over_from_killed_server[sglang]",
    "test_servers_sleep_and_wake_with_the_same_weights[sglang]",
    "test_log_probs_are_those_of_the_servers_temperature",  # those of a rollout in this process are tested next to it
    "test_compiled_graphs_are_reused_for_many_lengths[plain]",
    "test_too_few_resources_raise_and_the_placement_group_is_removed",
    "test_ppo_with_a_critic_learns",  # a step of it is compared in the tests of dispatch
    "test_grpo_learns_the_same_on_every_layout",  # the steps of each layout are
    "test_expert_parallel.py::test_checkpoint_resumes_in_another_layout",  # other kinds of parallelism do
    "test_hf_checkpoint_loads_in_transformers[qwen3-fsdp:d2c2]",
    "test_replica_equals_trainer_after_sync[fsdp:d1]",
    "test_replica_equals_trainer_after_sync[megatron:d1]",
    "test_dcp_checkpoint_resumes_bitwise[adamw-fsdp:d2c2",
    "test_offload_to_files_reduces_resident_memory[megatron:d1",
    "test_killed_writer_leaves_newest_complete_version[draft opened]",
    "test_surviving_ranks_name_the_dead_rank[die_in_a_loss-0-SIGSTOP]",
    "test_dcp_checkpoint_is_bitwise_equal_in_another_layout[w4-fsdp:r2d2",
    "test_dcp_checkpoint_is_bitwise_equal_in_another_layout[w4-fsdp:c4",
    "test_grpo_with_one_owner_has_the_bits_of_a_run_in_which_all_ranks_generate[fsdp:c2",
    # The labels of a server are read by one route or another.
    "test_two_owners_of_one_server_are_refused[completions]",
    "test_owner_notices_that_another_has_taken_its_server[tokens]",
    "test_restarted_server_gets_the_current_weights_before_its_next_token[completions]",
    # JAX compiles for each of these; others run the same code on another layout.
    "test_dcp_checkpoint_resumes_bitwise[jax:d2",
    "test_engines_share_the_world_of_their_process",
    "test_offload_frees_the_device_and_restores_bitwise[train-jax:d2",
    "test_a_run_that_moves_between_engines_follows_one_curve",  # the bits of what moves are compared
    "test_replica_equals_trainer_after_sync[jax:t2]",
    *(f"test_kernel_equals_blocks[splash-{length}]" for length in (2, 4, 5)),
    "test_loss_of_a_rank_is_named_and_the_others_live_on[1-19",
    "test_async_save_contains_state_at_the_call[hf-jax:d2]",
    "test_every_verb_agrees_with_the_reference[jax:(attn",
    *(f"test_every_verb_agrees_with_the_reference[jax:{layout}-" for layout in ("d2", "t2", "e2")),
    "test_report_is_of_the_shard[jax:t2]",
    "test_checkpoint_of_another_model_raises_and_loads_nothing[dcp-jax:d2",
    "test_checkpoint_of_another_model_raises_and_loads_nothing[hf-jax:d2",
)
"""Single tests that take long, and whose code other tests run as well."""


def mark_thorough(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that ``.ci/run`` leaves out."""
    for item in items:
        if _is_further_layout(item):
            item.add_marker(pytest.mark.thorough)
    named = {id(item) for item in named_tests(MUTANTS.values(), items)}
    for item in items:
        if id(item) in named:
            _unmark(item)
    for rule in (_further_cells, _products, _further_cases):
        for item in rule(items, named):
            if id(item) not in named:
                item.add_marker(pytest.mark.thorough)


def world_size(item: pytest.Item) -> int:
    """Return how many ranks a test takes; 0 without the marker ``world``.

    Raises:
        ValueError: a marker with several sizes on a parameter.
    """
    marker = item.get_closest_marker("world")
    if marker is None:
        return 0
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "world_size" in parameters:
        return int(str(parameters["world_size"]))
    if len(marker.args) != 1:
        raise ValueError(f"{item.nodeid}: a parameter is marked world{marker.args}; give one size there")
    return int(marker.args[0])


def _is_further_layout(item: pytest.Item) -> bool:
    name, marker = short_id(item), item.get_closest_marker("world")
    if any(each in name for each in ELSEWHERE):
        return True
    if marker is None:
        return False
    size = world_size(item)
    if size in marker.kwargs.get("thorough", ()):
        return True
    if STEPS in name:
        return any(each in name for each in (*FOUR_RANKS, *COMPILED))
    modes = SCHEDULES if name.startswith(GRID) else MODES
    return any(each in name for each in modes) or (size == 4 and any(each in name for each in PRODUCTS))


def _unmark(item: pytest.Item) -> None:
    # Marks of a parameter are the item's own as well.
    item.own_markers[:] = [marker for marker in item.own_markers if marker.name != "thorough"]


def _further_cells(items: Iterable[pytest.Item], named: set[int]) -> list[pytest.Item]:
    """Return the cells of the grid beyond two, or :data:`CELLS`, for each layout, and those in a lower precision beyond one.

    What a planted bug names counts first.
    """
    cells = [item for item in items if short_id(item).startswith(GRID) and not item.get_closest_marker("thorough")]
    cells.sort(key=lambda item: (id(item) not in named, *_rank(item.callspec.params["cell"])))  # type: ignore[attr-defined]
    chosen: defaultdict[str, list[bool]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    further = []
    for item in cells:
        cell = item.callspec.params["cell"]  # type: ignore[attr-defined]
        values, rounded = {(name, str(value)) for name, value in vars(cell).items()}, cell.dtype != "float64"
        others = chosen[cell.layout.name]
        if values <= seen and (len(others) >= CELLS.get(cell.layout.engine, 2) or (rounded and any(others))):
            further.append(item)
            continue
        others.append(rounded)
        seen |= values
    return further


def _rank(cell: Cell) -> tuple[bool, bool, bool]:
    """Order the cells of an engine with few of them: those that train all weights in float64, and compile soon, come first."""
    few = cell.layout.engine in CELLS
    return few and cell.options == "lora", few and cell.dtype != "float64", few and cell.family == "qwen3_moe"


def _products(items: Iterable[pytest.Item], named: set[int]) -> list[pytest.Item]:
    """Return the combinations of parameters whose values all occur in others that are left."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if short_id(item).startswith("dist/") and hasattr(item, "callspec") and not item.get_closest_marker("thorough"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    further = []
    for candidates in functions.values():
        seen = {value for item in candidates if id(item) in named for value in _values(item)}
        # Greedy: the combination with the most new values comes next, the first of equals.
        while candidates:
            best = max(candidates, key=lambda item: len(_values(item) - seen))
            if _values(best) <= seen:
                break
            seen |= _values(best)
            candidates.remove(best)
        further += candidates
    return further


def _further_cases(items: Iterable[pytest.Item], named: set[int]) -> list[pytest.Item]:
    """Return the cases of each test on ranks beyond :data:`CASES`, those of planted bugs counted first. The others are evenly spaced."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = short_id(item)
        counted = name.startswith("dist/") and not any(each in name for each in EACH)
        if counted and not item.get_closest_marker("thorough"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    further = []
    for cases in functions.values():
        others = [item for item in cases if id(item) not in named]
        count = max(CASES - (len(cases) - len(others)), 0)
        kept = {len(others) * i // count for i in range(count)} if count < len(others) else set(range(len(others)))
        further += [item for i, item in enumerate(others) if i not in kept]
    return further


def _values(item: pytest.Item) -> set[tuple[int, str]]:
    """Return the ids of a test's parameters: one for each decorator ``parametrize``, with its position."""
    return set(enumerate(item.callspec._idlist))  # type: ignore[attr-defined]
