"""Benchmarks: constant data, loops that agree with the reference, and detection of wrong rows."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import __main__ as command
from benchmarks import hybrid, workloads
from benchmarks.engine_row import EngineRow
from benchmarks.gpu import __main__ as gpu_command
from benchmarks.gpu.device import idle
from benchmarks.loops import LOOPS, Loop, PlainRow
from benchmarks.machine import cpu_name
from benchmarks.model import Size, write_model
from benchmarks.reference import STEPS, Reference, reference
from benchmarks.report import SUMMARY_COLUMNS, put_into
from benchmarks.rows import CEILING, Task, build, choose
from benchmarks.shapes import SHAPES, Shape

SIZE = Size(hidden=32, layers=2, vocabulary=96)
KINDS = {
    "ragged": workloads.ragged(sequences=5, tokens=60, vocabulary=96),
    "rl": workloads.rl(2, 3, prompt_tokens=8, median=6, bounds=(2, 9), vocabulary=96, max_tokens_per_mb=40),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """Return a tiny workload of each kind, on a tiny model."""
    folder = tmp_path_factory.mktemp("bench")
    write_model(folder / "model", SIZE)
    for name, workload in KINDS.items():
        workload.save(folder / f"{name}.npz")
    return {name: Task(str(folder / f"{name}.npz"), None, str(folder / "model")) for name in KINDS}


@pytest.fixture(scope="module")
def references(tasks: dict[str, Task], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    cache = tmp_path_factory.mktemp("cache")
    computed = {name: reference(task, cache) for name, task in tasks.items()}
    for name, task in tasks.items():  # read from the file this time
        assert reference(task, cache).grad_norms == computed[name].grad_norms
    return computed


@pytest.fixture(scope="module")
def no_group_left() -> Iterator[None]:
    had = dist.is_initialized()
    yield
    if dist.is_initialized() and not had:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", workloads.MAKERS)
def test_stored_arrays_equal_generated_arrays(name: str) -> None:
    kept, made = workloads.load(name), workloads.MAKERS[name]()
    assert all(map(torch.equal, kept.input_ids, made.input_ids))
    assert replace(kept, input_ids=()) == replace(made, input_ids=())


def test_workloads_match_the_documentation() -> None:
    ragged, rl = workloads.load("ragged"), workloads.load("rl")
    assert (len(ragged.lengths), ragged.tokens) == (24, 3243)
    assert (len(rl.lengths), max(rl.groups) + 1) == (128, 16)
    responses = [length - 512 for length in rl.lengths]
    assert min(responses) >= 64
    assert max(responses) <= 1024
    assert 170 < sorted(responses)[64] < 230
    assert torch.tensor(rl.sequence_weights).view(16, 8).mean(1).abs().max() < 1e-6
    assert all(torch.equal(rl.input_ids[i][:512], rl.input_ids[i // 8 * 8][:512]) for i in range(128))


def test_weights_are_nonzero_only_at_response_predictions() -> None:
    workload = KINDS["rl"]
    for weights, prompt, weight in zip(
        workload.weights, workload.prompt_lengths, workload.sequence_weights, strict=True
    ):
        assert not weights[: prompt - 1].any()
        assert weights[-1] == 0
        assert weights[prompt - 1 : -1].tolist() == [pytest.approx(weight)] * (len(weights) - prompt)


def test_groups_are_not_split_over_ranks() -> None:
    rl = workloads.load("rl")
    shards = [rl.shard_indices(rank, 2) for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == list(range(128))
    assert not {rl.groups[i] for i in shards[0]} & {rl.groups[i] for i in shards[1]}
    tokens = [rl.take(shard).tokens for shard in shards]
    assert max(tokens) < 1.1 * min(tokens)
    with pytest.raises(ValueError, match=r"ranks = 17.*16 groups"):
        rl.shard_indices(0, 17)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("benchmarks.engine_row", {}),
        *(("benchmarks.loops", {"loop": name}) for name in ("packed", "packed, trained", "padded", "single", "stock")),
    ],
    ids=lambda value: value.get("loop", "areal") if isinstance(value, dict) else "",
)
def test_benchmark_rows_agree_with_the_reference(
    tasks: dict[str, Task],
    references: dict[str, Reference],
    no_group_left: None,
    kind: str,
    module: str,
    options: dict[str, str],
) -> None:
    row = build(module, tasks[kind], options)
    logprobs = [x[mask] for x, mask in zip(row.forward(), KINDS[kind].trained, strict=True)]
    assert references[kind].wrong_forward(torch.cat(logprobs), "float32") is None
    losses, norms = zip(*(row.step() for _ in range(STEPS)), strict=True)
    assert references[kind].wrong_step(losses, norms, "float32") is None
    if isinstance(row, EngineRow):
        row.engine.destroy()


def test_wrong_benchmark_row_is_detected(tasks: dict[str, Task], references: dict[str, Reference]) -> None:
    exact = references["ragged"]
    good = LOOPS["stock"]

    def joined(model, batch):
        """Attend over all sequences as one, as a mask of ones does."""
        return good.logprobs(model, replace(batch, input_ids=(torch.cat(batch.input_ids),)))

    row = PlainRow(tasks["ragged"], Loop(good.cut, joined))
    assert exact.wrong_step(*zip(*(row.step() for _ in range(STEPS)), strict=True), "float32")
    decayed = PlainRow(replace(tasks["ragged"], weight_decay=10.0), good)
    wrong = exact.wrong_step(*zip(*(decayed.step() for _ in range(STEPS)), strict=True), "float32")
    assert wrong is not None
    assert "step 2" in wrong
    nan = [float("nan")] * STEPS
    assert exact.wrong_step(nan, exact.grad_norms, "float32")
    assert exact.wrong_step(exact.losses, nan, "float32")
    assert exact.wrong_step(exact.losses, exact.grad_norms, "float32") is None
    assert exact.wrong_forward(exact.logprobs.flip(0), "float32")
    assert exact.wrong_forward(exact.logprobs[1:], "float32")


def test_benchmark_runs_end_to_end(
    tasks: dict[str, Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # when no peer is installed
    settings = command.Settings(
        workload=(tasks["rl"].workload,),
        rows=("stock", "torchtitan"),
        peers=True,
        rounds=2,
        output=tmp_path,
        hidden=32,
        layers=2,
        docs=tmp_path / "page.md",
    )
    (tmp_path / "page.md").write_text("Before.\n\n<!-- benchmark rl -->\nold\n<!-- end -->\n\nAfter.\n")
    command.main(settings)
    written = json.loads((tmp_path / "rl-peers-float32.json").read_text())
    *right, missing = written["train"]
    assert missing["row"].startswith("torchtitan")
    assert "did not run: there is no" in missing["wrong"]
    assert {entry["row"] for entry in right} == {CEILING, "transformers, packed, stock mask"}
    for entry in [*right, *written["forward"]]:
        assert entry["wrong"] is None
        assert entry["ratio"]["low"] <= entry["ratio"]["median"] <= entry["ratio"]["high"]
        assert entry["peak_mb"] > entry["rise_mb"] > 0
    assert all(len(turns["steps"]) == STEPS + 2 and len(turns["forwards"]) == 1 + 2 for turns in written["turns"][:2])
    assert "| right" in capsys.readouterr().out
    assert (tmp_path / "rl-peers-float32.png").stat().st_size > 5000
    before, table, after = re.split(r"<!-- .* -->\n?", (tmp_path / "page.md").read_text())
    assert (before, after) == ("Before.\n\n", "\nAfter.\n")
    assert cpu_name() in table
    lines = table.strip().partition("\n\n")[2].splitlines()
    assert [line.split(" |")[0].strip("| ") for line in lines[2:]] == [entry["row"] for entry in right]


def test_table_of_a_page_is_one_of_the_benchmark(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "jax.md").read_text()
    (table,) = re.findall(r"<!-- benchmark ragged -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    heading, _, lines = table.partition("\n\n")
    assert re.match(r"On \d{4}-\d\d-\d\d, on (one core|\d+ cores) of .+ \((AVX2|AVX512|DEFAULT)\),", heading)
    columns, _, *rows = lines.splitlines()
    assert [column.strip() for column in columns.strip("|").split("|")] == SUMMARY_COLUMNS
    assert any("areal jax:d1" in row for row in rows)
    (tmp_path / "page.md").write_text("no table")
    with pytest.raises(ValueError, match=r"page\.md: add the lines <!-- benchmark ragged --> and <!-- end -->"):
        put_into(tmp_path / "page.md", "ragged", table)


def test_invalid_benchmark_options_raise() -> None:
    with pytest.raises(ValueError, match=r"rows = 'nobody'.*in the name of no row"):
        choose(["nobody"])
    with pytest.raises(ValueError, match=r"workload = 'nothing': choose ragged, rl"):
        workloads.load("nothing")
    with pytest.raises(ValueError, match=r"prompts = 17.*has 16"):
        workloads.load("rl").first_groups(17)
    with pytest.raises(ValueError, match=r"ranks = \(2,\).*add 1"):
        command.main(command.Settings(ranks=(2,)))
    with pytest.raises(ValueError, match=r"hidden = 33.*multiple of 32"):
        Size(hidden=33).shape.config()


# ---- on a GPU


def test_step_flop_equals_hand_count() -> None:
    """Check one layer with one head: 6 operations per parameter and token, 12 per column of each attending pair."""
    shape = Shape(hidden=4, intermediate=8, layers=1, heads=1, kv_heads=1, head_dim=4, vocabulary=16)
    parameters = 4 * 4 * 4 + 3 * 4 * 8 + 4 * 16
    assert shape.matrix_parameters == parameters
    assert shape.step_flop([10, 2]) == 6 * parameters * 12 + 12 * 4 * (50 + 2)
    assert SHAPES["1.7B"].matrix_parameters == pytest.approx(1.7e9, rel=0.02)
    assert SHAPES["8B"].matrix_parameters == pytest.approx(7.6e9, rel=0.02)


def test_idle_time_is_not_covered_by_kernels() -> None:
    assert idle([(0, 4), (1, 2), (3, 6), (8, 10)]) == pytest.approx(0.2)
    assert idle([]) == 1.0


def test_gpu_benchmark_runs_on_cpu_with_tiny_shape(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    settings = gpu_command.Settings(("tiny",), (96,), sequence=40, rounds=1, device="cpu", output=output)
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="this machine computes on 'cuda'"):
            gpu_command.main(settings)
        return
    gpu_command.main(settings)
    result = json.loads(output.read_text())
    assert [entry["row"] for entry in result["steps"]] == ["tiny areal fsdp:d1", "tiny plain transformers"]
    assert all(entry["mfu"] > 0 for entry in result["steps"])
    assert [entry["head"] for entry in result["head"]] == ["chunked", "all logits"]
    with pytest.raises(ValueError, match="there are"):
        gpu_command.main(dataclasses.replace(settings, shapes=("9B",)))


def test_ways_of_a_hybrid_model_take_the_same_steps(tmp_path: Path) -> None:
    results = hybrid.measure(hybrid.write_model(tmp_path, hidden=32), hybrid.samples((5, 21, 3)), rounds=1)
    losses = {way: losses for way, (losses, _) in results.items()}
    assert list(losses) == ["packed", "rows", "one by one"]
    for way in ("rows", "one by one"):
        assert losses[way] == pytest.approx(losses["packed"], rel=1e-5)
    assert losses["packed"][1] < losses["packed"][0]
