"""Bugs of the HTTP layer that the suite must catch: keys, bodies, the forms of requests and results."""

from __future__ import annotations

import dataclasses
import io

import zstandard

from areal.tests.mutants.planting import Function, mutant

ROUTES = "tinker/api/test_routes.py::"
CODECS = "tinker/api/test_codecs.py::"
BODIES = "tinker/api/test_bodies.py::"


@mutant("areal.tinker.api.middleware:ApiKeys.caller", ROUTES + "test_keys")
def key_accepted_by_its_form(right: Function) -> Function:
    """Any key that begins as a key does is accepted."""
    return lambda self, key: right(self, key) or (self._callers[0][1] if (key or "").startswith("tml-") else None)


@mutant("areal.tinker.api.context:LinkSigner.accepts", ROUTES + "test_links_expire")
def link_without_end(right: Function) -> Function:
    """A download link is valid after its expiry."""
    return lambda self, expires, signature, *parts: signature == self._signature(expires, *parts)


@mutant("areal.tinker.api.context:LinkSigner._signature", ROUTES + "test_archive_and_single_files")
def link_to_one_file_opens_all(right: Function) -> Function:
    """The signature of a link does not cover the name of the file."""
    return lambda self, *parts: right(self, *parts[:-1])


@mutant(
    "areal.cli.serve:connection_class",
    "tinker/api/test_connections.py::test_a_request_that_stays_incomplete_ends_its_connection*",
)
def half_a_request_waits_for_ever(right: Function) -> Function:
    """A connection stays however long its request takes to arrive."""
    return lambda max_connections, read_timeout_s: right(max_connections, 3600.0)


@mutant("areal.tinker.api.middleware:decompress", BODIES + "test_damaged_zstd_is_a_bad_request*")
def truncated_body_accepted(right: Function) -> Function:
    """A truncated compressed body is decoded as far as it goes."""
    return lambda data, limit: zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read(limit)


@mutant(
    "areal.tinker.api.schemas:Body.refusal", ROUTES + "test_an_unknown_field_is_refused_in_its_turn_unless_it_is_off"
)
def unknown_option_ignored(right: Function) -> Function:
    """A field that the server does not know is ignored."""
    return lambda self: None


@mutant("areal.tinker.api.codec:digest", ROUTES + "test_a_repeated_request_has_the_same_digest")
def requests_with_one_digest(right: Function) -> Function:
    """Another request with the number of an earlier one is taken for its repetition."""
    return lambda body: right(b"")


@mutant("areal.tinker.api.codec:refused_request", ROUTES + "test_a_wrong_field_fails_in_its_turn[save_weights]")
def a_wrong_field_leaves_a_gap(right: Function) -> Function:
    """A request with a wrong field is refused at once, and later requests of its model wait for its number."""
    return lambda body, message: None


@mutant("areal.tinker.api.codec:forward_backward_from_protobuf", CODECS + "test_protobuf_request")
def text_of_a_loss_configuration_lost(right: Function) -> Function:
    """Only the numbers of a loss configuration arrive."""

    def wrong(*arguments: object) -> object:
        request = right(*arguments)
        numbers = {name: value for name, value in request.loss_fn_config.items() if isinstance(value, float)}
        return dataclasses.replace(request, loss_fn_config=numbers)

    return wrong


@mutant("areal.tinker.api.codec:_pass_message", CODECS + "test_records_hold_arrays_of_one_trailing_shape")
def log_probs_without_their_columns(right: Function) -> Function:
    """Log-probs of several targets per position are sent as one row."""
    return lambda result: right(dataclasses.replace(result, logprobs=[array.ravel() for array in result.logprobs]))


@mutant("areal.tinker.api.codec:_top_message", CODECS + "test_samples_in_both_forms")
def position_without_a_distribution_is_nan(right: Function) -> Function:
    """A position without a distribution has NaN instead of the protocol's mark."""

    def wrong(top: object) -> object:
        message = right(top)
        message.logprobs = top.logprobs.astype("<f4").tobytes()  # type: ignore[attr-defined]
        return message

    return wrong


@mutant(
    "areal.tinker.api.codec:forward_backward_from_protobuf",
    ROUTES + "test_a_message_to_forward_adds_no_gradient[forward-Forward]",
)
def gradient_of_a_message_to_forward(right: Function) -> Function:
    """A message to the route of a forward pass adds its gradient."""
    return lambda body, kind: right(body)
