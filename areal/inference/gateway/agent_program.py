"""Agent programs in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

_SHOWN = 2000
"""Maximum number of characters of a program's last words in an error message."""


class AgentProgram:
    """Runs a command as an agent: ``await program(base_url, item)`` returns what it prints.

    The program finds its endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, as OpenAI's clients do by themselves, and the item as JSON on
    its standard input. When the call is cancelled or takes too long, the process and those that it started are killed.

    Args:
        command: program and arguments.
        seconds: time limit of a run; ``None`` for no limit.
        environment: further variables. Those of this process are inherited.

    Raises:
        ValueError: ``command`` is a string, or empty.
    """

    def __init__(
        self, command: Sequence[str], *, seconds: float | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(f"command = {command!r}: pass a list of the program and its arguments")
        self._command, self._seconds, self._environment = list(command), seconds, dict(environment or {})

    async def __call__(self, base_url: str, item: Any) -> str:
        """Run the program once.

        Raises:
            TimeoutError: it took longer than ``seconds``.
            RuntimeError: it ended with another exit code than 0; has its last words.
        """
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
        # Files, and no pipes: children that outlive the program would keep a pipe open.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            given.write(json.dumps(item).encode())
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=given,
                stdout=printed,
                stderr=errors,
                env={**os.environ, **own, **self._environment},
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(self._seconds):
                    await process.wait()
            except TimeoutError:
                raise TimeoutError(f"{self._command[0]} took longer than {self._seconds:g} s") from None
            finally:
                # Its session: children that outlive it are killed, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            text, last_words = _text_of(printed), _text_of(errors)
        if process.returncode:
            last = last_words.strip()[-_SHOWN:]
            raise RuntimeError(f"{self._command[0]} ended with exit code {process.returncode}: {last}")
        return text


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
