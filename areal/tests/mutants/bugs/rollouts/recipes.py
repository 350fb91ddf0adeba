"""Bugs of recipes and trackers that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

ROWS = "unit/recipes/test_rows.py::test_{}"
RECORD = "unit/recipes/test_record.py::test_{}"
EVALUATION = "unit/recipes/test_policy_evaluation.py::test_{}"
RUNS = "dist/recipes/test_policy_recipes.py::test_{}"
PAGE = "unit/project/test_docs.py::test_code_blocks_run[docs/{}.md]"
SUPERVISED = "dist/recipes/test_supervised_recipes.py::test_{}"


@mutant("areal.recipes.evaluation:pass_at_k", EVALUATION.format("pass_at_k_is_the_mean_over_all_choices_of_k_answers"))
def pass_at_k_with_replacement(right: Function) -> Function:
    """The estimate of pass@k takes answers with replacement, which is biased."""
    return lambda samples, passed, k: 1.0 - (1.0 - passed / samples) ** k


@mutant("areal.recipes.data.rows:split_rows", ROWS.format("renamed_columns_and_held_out_rows"))
def held_out_rows_are_trained_on(right: Function) -> Function:
    """Rows for evaluation are among those that are trained on."""
    return lambda rows, held_out, seed: (rows, right(rows, held_out, seed)[1])


@mutant("areal.recipes.data.formats:pair_messages", "unit/recipes/test_formats.py::test_pairs")
def prompt_of_a_pair_is_lost(right: Function) -> Function:
    """The column ``prompt`` of a pair is ignored."""
    return lambda row, system="": right({name: row[name] for name in row if name != "prompt"}, system)


@mutant("areal.recipes.record.run_record:check_record", RECORD.format("another_run_does_not_replace_checkpoints"))
def run_replaces_another(right: Function) -> Function:
    """A run begins in the directory of another one, and replaces its checkpoints."""
    return lambda config: None


@mutant("areal.recipes.record.samples:SampleLog._line", RECORD.format("samples_are_written_as_lines_and_as_a_page"))
def samples_shifted_by_one(right: Function) -> Function:
    """Trained tokens of the log are one position too early."""

    def wrong(self: Any, step: int, sample: Any) -> Any:
        line = right(self, step, sample)
        return line | {"trained": [*line["trained"][1:], 0]}

    return wrong


@mutant(
    "areal.trainer.trackers.tracker:Trackers.log",
    "unit/trainer/test_trackers.py::test_a_tracker_that_fails_is_named_once_and_the_others_go_on",
)
def tracker_ends_the_run(right: Function) -> Function:
    """An error of a tracker ends the run."""

    def wrong(self: Any, step: int, scalars: Any) -> None:
        for tracker in self._trackers:
            tracker.log(step, scalars)

    return wrong


@mutant("areal.recipes.policy:PolicyRun._shape", RUNS.format("settings_reach_their_places[fsdp:d1]"))
def long_answers_are_not_penalised(right: Function) -> Function:
    """``overlong_tokens`` and ``shuffle_rewards`` do nothing."""
    return lambda self: lambda rewards, samples: rewards


@mutant("areal.recipes.setup:checkpoints_of", RUNS.format("resumed_run_continues_the_curve[fsdp:d2]"))
def evaluations_are_forgotten_by_a_resume(right: Function) -> Function:
    """Results of evaluations are not part of a checkpoint."""

    def wrong(config: Any, results: Any) -> Any:
        made = right(config, results)
        made._stateful = {}
        return made

    return wrong


@mutant("areal.recipes.run:Run._gave_up", SUPERVISED.format("patience_ends_a_run_that_does_not_become_better[fsdp:d2]"))
def patience_never_ends(right: Function) -> Function:
    """A run goes on, however many evaluations are not better."""
    return lambda self: False


@mutant("areal.recipes.run:Run._add_evaluation", PAGE.format("run-directory"))
def evaluations_of_a_run_are_not_logged(right: Function) -> Function:
    """Evaluations are computed, and no tracker receives them."""

    def wrong(self: Any) -> None:
        self.results.add(self.trainer.step, self.evaluate())

    return wrong


@mutant("areal.recipes.record.secrets:public_settings", RECORD.format("no_record_has_a_secret"))
def record_has_secrets(right: Function) -> Function:
    """Keys of servers and services are written to the record."""
    return lambda config, **options: config.model_dump(mode="json")


@mutant(
    "areal.trainer.estimators:OnPolicyDistillation.__call__",
    "unit/trainer/test_estimators.py::test_distillation_is_the_difference_of_log_probs_at_trained_tokens",
)
def distillation_goes_away_from_the_teacher(right: Function) -> Function:
    """Tokens that the teacher prefers become less likely."""

    def wrong(self: Any, samples: Any, sum_over_ranks: Any) -> Any:
        return [each | {"advantages": -each["advantages"]} for each in right(self, samples, sum_over_ranks)]

    return wrong


@mutant("areal.recipes.reproduce:compare", "unit/recipes/test_command.py::test_a_run_is_reproduced_to_the_bit")
def another_run_is_called_the_same(right: Function) -> Function:
    """A repetition is compared with any tolerance."""
    return lambda recorded, run, steps, tolerance: right(recorded, run, steps, 1e9)


@mutant("areal.recipes.record.run_record:start_record", RECORD.format("evaluations_are_kept_row_by_row"))
def evaluations_of_another_run_stay(right: Function) -> Function:
    """A run that begins again keeps the evaluations of the one before, and is compared with them."""

    def wrong(config: Any, recipe: str, fingerprints: Any) -> None:
        file = config.output / "evaluations.jsonl"
        text = file.read_text() if file.exists() else None
        right(config, recipe, fingerprints)
        if text is not None:
            file.write_text(text)

    return wrong
