"""Bugs of SGLang servers, of stop strings and of the comparison of models that the suite must catch."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.inference.http.servers.dialect import PauseRoutes
from areal.tests.mutants.planting import Function, mutant

SGLANG = "unit/inference/http/test_sglang.py::test_{}"
KINDS = "unit/inference/http/test_servers.py::test_{}"
MODELS = "unit/inference/http/test_server_models.py::test_{}"
STOP = "unit/inference/http/test_stop_and_top.py::test_{}"
ADAPTERS = "unit/inference/http/test_adapter_updates.py::test_{}"


@mutant(
    "areal.inference.http.servers.sglang:SGLangRoutes.__init__",
    KINDS.format("generation_continues_across_an_update[sglang]"),
)
def requests_sent_twice(right: Function) -> Function:
    """An update of the model aborts requests that the server would continue."""

    def wrong(self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self.pauses = PauseRoutes(self.pauses.interrupt, self.pauses.interrupt, self.pauses.resume)

    return wrong


@mutant(
    "areal.inference.http.servers.sglang:SGLangRoutes.read_reply",
    KINDS.format("truncated_sampling_renormalizes_logprobs[*sglang*]"),
    SGLANG.format("log_probs_under_top_p_are_of_the_tokens_that_are_left"),
)
def log_probs_before_truncation(right: Function) -> Function:
    """Log-probs under ``top_p`` and ``top_k`` are those over all tokens."""

    def wrong(self: Any, reply: Any, sampling: Any) -> Any:
        part = right(self, reply, sampling)
        values = tuple(logprob for logprob, _, _ in reply.meta_info.output_token_logprobs)
        return dataclasses.replace(part, logprobs=values)

    return wrong


@mutant("areal.inference.http.servers.sglang:SGLangRoutes.load", ADAPTERS.format("sglang_loads_the_adapter_alone"))
def adapter_loaded_over_another(right: Function) -> Function:
    """An adapter is loaded under a name that is not free."""
    return lambda self, folder, label: right(self, folder, label)[-1:]


@mutant(
    "areal.inference.http.servers.sglang:SGLangGroupRoutes.finish",
    "unit/inference/group/test_group_updates.py::test_sglang_receives_over_a_named_group",
)
def session_left_open(right: Function) -> Function:
    """Weights over a group are sent in a session that does not end: quantised ones are not packed again."""
    return lambda self, label: right(self, label)[1:]


@mutant(
    "areal.inference.http.model_check:ModelCheck.check",
    MODELS.format("model_of_another_shape_is_refused[vllm]"),
    MODELS.format("weights_of_the_start_are_those_of_the_model"),
    MODELS.format("other_tokenizer_is_refused[sglang]"),
    MODELS.format("servers_of_one_owner_are_equal"),
)
def another_model_accepted(right: Function) -> Function:
    """A server may have any model."""

    async def wrong(self: Any, *_: Any, **__: Any) -> None:
        return None

    return wrong


@mutant("areal.inference.stop_strings:StopStrings.find", STOP.format("stop_string_that_an_interruption_cuts_is_found"))
def cut_stop_string_missed(right: Function) -> Function:
    """Stop strings of answers from servers are left to these."""
    return lambda self, tokens, start: None


@mutant(
    "areal.inference.http.server:Server._claim",
    SGLANG.format("server_that_an_ended_owner_left_paused_is_resumed"),
    SGLANG.format("vllm_without_labels_that_was_left_paused_is_resumed"),
)
def paused_server_taken(right: Function) -> Function:
    """A server is used as the owner before has left it."""

    async def wrong(self: Any, routes: Any, found: Any, version: int, seconds: float) -> None:
        await right(self, routes, "default", version, seconds)

    return wrong


@mutant("areal.inference.http.updates:WeightUpdates.sync", ADAPTERS.format("adapter_is_sent_alone_and_answers*"))
def merged_weights_written(right: Function) -> Function:
    """An update of an adapter writes the merged weights, too."""

    def wrong(self: Any, engine: Any, version: int) -> None:
        right(self, engine, version)
        self._send(engine, version)

    return wrong


@mutant(
    "areal.inference.protocol:checked_prompt",
    SGLANG.format("token_outside_the_vocabulary_is_refused"),
)
def tokens_of_another_vocabulary(right: Function) -> Function:
    """Prompts are sent with tokens that the model does not have, which end a server."""
    return lambda prompt_ids, vocab_size=None: right(prompt_ids)


@mutant("areal.inference.http.updates:Completeness.check", SGLANG.format("directory_that_does_not_fit_is_refused[*]"))
def directory_left_to_the_server(right: Function) -> Function:
    """A directory with other names or shapes is left to a server that does not look at them."""
    return lambda self, folder, *, fully: right(self, folder, fully=False)


@mutant(
    "areal.inference.http.servers.sglang:_check_layers",
    SGLANG.format("adapter_whose_layers_cannot_be_stacked_is_refused[*]"),
)
def adapter_that_cannot_be_stacked(right: Function) -> Function:
    """An adapter is loaded that ends the server at the next request."""
    return lambda folder: None


@mutant(
    "areal.inference.http.servers.sglang:_number",
    SGLANG.format("log_probs_that_are_missing_are_not_finite"),
)
def missing_log_prob_is_certain(right: Function) -> Function:
    """A log-prob that is not finite counts as 0."""
    return lambda logprob: 0.0 if logprob is None else logprob
