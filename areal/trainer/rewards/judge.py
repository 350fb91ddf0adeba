"""Rewards by a model that judges answers, behind an OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from pydantic import BaseModel, Field, ValidationError

from areal.chat.answer import Message
from areal.trainer.rewards.answer_text import AnswerText, last_content
from areal.trainer.rewards.reply_cache import ReplyCache

_ROUTE = "/v1/chat/completions"
_KEEPALIVE_SECONDS = 3.0
"""Seconds that an idle TCP connection is kept. Servers close it after 5, and may do so when a request is on its way."""
_LONGEST_BACKOFF, _LONGEST_RETRY_AFTER = 30.0, 60.0
"""Maximum seconds between two attempts: by the back-off, and by a server's ``Retry-After``."""
_SHOWN = 300
"""Maximum number of characters of a reply in an error message."""
_STATED = re.compile(r"\bscore\b\W*?[:=][^\w.,+\-\u2212]*(?=([-+\u2212.,]*\d[^\n]*))", re.IGNORECASE)
"""What is behind ``Score:``, if it has a digit."""
_NUMBER = re.compile(r"([-+\u2212]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?!\d|[.,]\d|\s*[/%]|e[-+]?\d)", re.IGNORECASE)
"""A number that is no fraction, percentage, or number with a comma."""


class _ReplyMessage(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _ReplyMessage


class _Reply(BaseModel):
    """Reply of the route."""

    choices: list[_Choice] = Field(min_length=1)


class UnscoredReply(ValueError):
    """The reply of a judge has no score."""


class _Temporary(Exception):
    """Another attempt may succeed: after ``seconds``, if the server says so."""

    def __init__(self, report: str, seconds: float = 0.0) -> None:
        super().__init__(report)
        self.seconds = seconds


def stated_score(text: str) -> float:
    """Return the number behind the last ``Score:`` of a text.

    Raises:
        ValueError: there is none, or it has another form than ``0.5``, such as ``1/2``, ``50%`` or ``0,5``.
    """
    stated = _STATED.findall(text)
    number = _NUMBER.match(stated[-1]) if stated else None
    if number is None:
        raise ValueError("no line has the form 'Score: 0.5'")
    return float(number[1].replace("\u2212", "-"))


class Judge:
    """Reward by a model behind ``url`` + ``/v1/chat/completions``. ``await judge(item, answer)`` works on any event loop.

    A request that cannot be sent, gets no reply in time, or the status 408, 429, or 500 and above is sent again, after a back-off that
    doubles, or after the seconds of ``Retry-After``, at most 60. A failed reward raises: it never becomes a number. Replies with a score
    are kept, so that equal requests, also at the same time, are sent once. Requests run in a thread of the judge.

    Args:
        url: base URL of the server, without ``/v1``.
        model: name of the model.
        messages: function from an item and the text of an answer to the messages for the judge.
        text: function from an answer to its text.
        score: function from the judge's reply to a number; it raises if the reply has no score.
        options: further fields of the request, such as ``max_tokens``; temperature 0 unless they have another.
        headers: headers of each request, such as an API key.
        concurrency: maximum number of requests at once, with those that wait for their next attempt.
        attempts: maximum number of times that a request is sent.
        seconds: time limit of an attempt.
        backoff_seconds: mean wait before the second attempt, doubled with each further one, up to 30.
        cache_size: maximum number of replies kept in memory; 0 keeps none.
        cache_file: file to which replies are appended, and from which they are read at the start. Its key is the request, not the URL.
        use_proxy: read ``HTTPS_PROXY`` and the like.

    Attributes:
        counts: number of rewards by outcome (``scored``; ``unscored``, whose reply has no score; ``failed``), of ``cached`` replies among
            them, and of attempts: ``requests``, ``retries``, ``timeouts``.

    Raises:
        ValueError: a number is out of range, or ``url`` is no base URL.
        OSError: ``cache_file`` cannot be opened.
    """

    def __init__(
        self,
        url: str,
        model: str,
        messages: Callable[[Any, str], list[Message]],
        *,
        text: AnswerText = last_content,
        score: Callable[[str], float] = stated_score,
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        concurrency: int = 32,
        attempts: int = 5,
        seconds: float = 60.0,
        backoff_seconds: float = 0.5,
        cache_size: int = 10_000,
        cache_file: str | Path | None = None,
        use_proxy: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")) or url.rstrip("/").endswith("/v1"):
            raise ValueError(f"Judge.url = {url!r}: pass the base URL, such as 'http://localhost:8000', without '/v1'")
        # Each number with its condition and the text of the rule.
        for name, value, fits, rule in (
            ("concurrency", concurrency, concurrency >= 1, "at least 1"),
            ("attempts", attempts, attempts >= 1, "at least 1"),
            ("seconds", seconds, seconds > 0, "above 0"),
            ("backoff_seconds", backoff_seconds, backoff_seconds >= 0, "at least 0"),
        ):
            if not fits:
                raise ValueError(f"Judge.{name} = {value}: it must be {rule}")
        self._url, self._messages, self._text, self._score = url.rstrip("/"), messages, text, score
        self._fixed = {"model": model, "temperature": 0, **(options or {})}
        self._headers, self._use_proxy = dict(headers or {}), use_proxy
        self._attempts, self._seconds, self._backoff = attempts, seconds, backoff_seconds
        self._cache = ReplyCache(cache_size, cache_file)
        names = ("scored", "unscored", "failed", "cached", "requests", "retries", "timeouts")
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        # Everything below belongs to the event loop, which runs in a thread from the first reward on.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="judge", daemon=True)
        self._starting = threading.Lock()
        weakref.finalize(self, _stop, self._loop, self._thread)
        self._places = asyncio.Semaphore(concurrency)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._client: httpx2.AsyncClient | None = None
        self._running = 0
        self._closing = False

    async def __call__(self, item: Any, answer: Any) -> float:
        """Return the reward of an answer.

        Raises:
            UnscoredReply: the judge's reply has no score: shows the reply.
            RuntimeError: all attempts failed, or the server rejected the request: names the server and the last fault.
        """
        body = {**self._fixed, "messages": self._messages(item, self._text(answer))}
        with self._starting:
            if not self._thread.is_alive():
                self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._judged(body), self._loop))

    def close(self) -> None:
        """Close the connections once no request is running. The judge may be used again."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close_when_idle(), self._loop)

    # ---- on the event loop of the judge

    async def _judged(self, body: dict[str, Any]) -> float:
        """Return the score of a request, and count it."""
        self._running += 1
        self._closing = False
        try:
            score = await self._scored(body)
        except Exception as error:
            self.counts["unscored" if isinstance(error, UnscoredReply) else "failed"] += 1
            raise
        finally:
            self._running -= 1
            if self._closing:
                await self._close_when_idle()
        self.counts["scored"] += 1
        return score

    async def _scored(self, body: dict[str, Any]) -> float:
        """Return the score of a request, from the cache or from the server."""
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        # Equal requests wait for the first. If it fails or is cancelled, the next one is sent.
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            kept = self._cache.get(key)
            if kept is not None:
                self.counts["cached"] += 1
                return self._read_score(kept)
            async with self._places:
                reply = await self._ask(body)
            score = self._read_score(reply)
            self._cache.put(key, reply)
        return score

    def _read_score(self, reply: str) -> float:
        """Return the number in a reply."""
        try:
            score = float(self._score(reply))
            if not math.isfinite(score):
                raise ValueError(f"{score} is not finite")
        except Exception as error:
            raise UnscoredReply(
                f"the judge {self._url} gave no score: {error}. It answered {reply[:_SHOWN]!r}"
            ) from error
        return score

    async def _ask(self, body: dict[str, Any]) -> str:
        """Send a request until it has a reply, and return it."""
        attempt = 1
        while True:
            try:
                return await self._send(body)
            except _Temporary as fault:
                if attempt == self._attempts:
                    raise RuntimeError(f"the judge gave no answer in {attempt} attempts; the last: {fault}") from fault
                # Randomised, so that requests that failed together are not sent together again.
                wait = self._backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                self.counts["retries"] += 1
                attempt += 1
                await asyncio.sleep(max(min(wait, _LONGEST_BACKOFF), fault.seconds))

    async def _send(self, body: dict[str, Any]) -> str:
        """Send a request once, and return the text of its reply."""
        self.counts["requests"] += 1
        where = f"{self._url}{_ROUTE}"
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._connections().post(where, json=body, timeout=None)
        except TimeoutError as error:
            self.counts["timeouts"] += 1
            raise _Temporary(f"{where}: no answer within {self._seconds:g} s") from error
        except httpx2.TransportError as error:
            raise _Temporary(f"{where}: {type(error).__name__}: {error}") from error
        report = f"{where}: status {answer.status_code}: {answer.text[:_SHOWN]}"
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            raise _Temporary(report, _retry_after(answer.headers))
        if answer.status_code != 200:
            raise RuntimeError(report)
        try:
            return _Reply.model_validate_json(answer.content).choices[0].message.content
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(key) for key in first["loc"])
            raise RuntimeError(f"{report}: the field {field!r} of the reply does not fit: {first['msg']}") from error

    def _connections(self) -> httpx2.AsyncClient:
        """Return the client, made by the first request and by the first after :meth:`close`."""
        if self._client is None:
            limits = httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS
            )
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, trust_env=self._use_proxy)
        return self._client

    async def _close_when_idle(self) -> None:
        """Close the connections now if no request is running, or else after the last one."""
        self._closing = True
        if self._running == 0 and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of the header ``Retry-After``, at most a minute; 0 without one, or if it has a date."""
    seconds = headers.get("retry-after", "")
    return min(float(seconds), _LONGEST_RETRY_AFTER) if seconds.isdecimal() else 0.0


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped. Runs in the thread of a judge."""
    loop.run_forever()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the thread of a judge that is not used any more."""
    if thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
    elif not loop.is_running():
        loop.close()
