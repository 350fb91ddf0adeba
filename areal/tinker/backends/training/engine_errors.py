"""Errors of an engine as errors of the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areal.dispatch import Executor
from areal.dispatch.errors import WorkerLostError
from areal.tinker.backends.errors import BackendLostError, ServerError, UserError
from areal.utils.distributed import EngineLostError


def lost_error(cause: BaseException) -> BackendLostError:
    """Return the error of all calls after the loss of the ranks."""
    return BackendLostError(f"the training processes were lost, and all models with them: {cause}")


@contextmanager
def protocol_errors(executor: Executor) -> Iterator[None]:
    """Raise errors of the engine inside as those of the protocol.

    Args:
        executor: processes of the ranks.

    Raises:
        UserError: the engine has refused its arguments.
        BackendLostError: the ranks are lost.
        ServerError: any other error.
    """
    try:
        yield
    except (UserError, ServerError):
        raise
    except (EngineLostError, WorkerLostError) as error:
        raise lost_error(error) from error
    except ValueError as error:
        raise UserError(_in_terms_of_the_server(str(error))) from error
    except Exception as error:
        if executor.lost is not None:
            raise lost_error(executor.lost) from error
        raise ServerError(_in_terms_of_the_server(f"{type(error).__name__}: {error}")) from error


def _in_terms_of_the_server(text: str) -> str:
    """Return the text of an engine's error with the names of settings, and without its note on gradients, which are kept here."""
    discarded = " (all pending gradients were discarded; the engine can be used for the next call)"
    return text.replace(discarded, "").replace("mb_spec.max_tokens_per_mb", "backend_config.max_tokens_per_mb")
