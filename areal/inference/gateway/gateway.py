"""The endpoint: its sessions and its HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import Counter, deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Literal

import uvicorn
from transformers import PreTrainedTokenizerBase

from areal.chat import Chat, Conversation
from areal.chat.call_format import Parser
from areal.inference.embedded_server import EmbeddedServer, listen
from areal.inference.gateway import replies
from areal.inference.gateway.chat_request import ChatRequest
from areal.inference.gateway.drawing import Drawing, check_extra_fields
from areal.inference.gateway.history import MessageHistory
from areal.inference.gateway.http_routes import create_gateway_app
from areal.inference.gateway.request_error import RequestError
from areal.inference.gateway.session import Session
from areal.inference.gateway.text_request import TextRequest, TokenRequest
from areal.inference.protocol import RolloutClient, Sampling

_ENDED = 10_000
"""Number of ended sessions whose names are known."""
_CHATS = 64
"""Maximum number of sets of tools whose templates are kept."""


class Gateway:
    """Serves OpenAI's interface in front of rollouts, and records what is sampled.

    Routes are ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models`` and vLLM's ``/inference/v1/generate``, below the ``base_url`` of
    a session, or with its id as the API key or as the header ``X-Session-ID``. Answers are generated with what a program asks for. A request
    is refused, by name, if its answer could not be trained on: penalties, forced calls or formats, greedy answers.

    Use it as an asynchronous context manager: it serves on the event loop that enters it.

    Args:
        tokenizer: a fast tokenizer, with a chat template for messages.
        sampling: parameters that a request leaves out.
        models: names of the model that programs may ask for; ``None`` for any.
        fixed_sampling: take ``temperature``, ``top_p`` and ``top_k`` from ``sampling`` in any case, whatever a program asks for.
        rewrites: if the template renders earlier turns otherwise once messages follow, such as without their reasoning: ``"new"`` begins
            another sequence with the tokens of the template, and ``"keep"`` continues with the tokens that were sampled.
        parse_calls: see :class:`~areal.chat.Chat`.
        max_model_len: context length that ``/v1/models`` names.
        idle_seconds: a session without a request for this time is ended, and counted; ``None`` for no limit.
        host, port: address; port 0 takes a free one. Programs on other hosts need a host that they reach.

    Attributes:
        counts: numbers of requests that were refused, by the code of their error; ``timed_out``: sessions that nobody ended.

    Raises:
        ValueError: ``sampling`` is greedy, or an argument is out of range.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        models: Sequence[str] | None = ("policy",),
        fixed_sampling: bool = False,
        rewrites: Literal["new", "keep"] = "new",
        parse_calls: Parser | None = None,
        max_model_len: int | None = None,
        idle_seconds: float | None = 3600.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0: greedy answers cannot be trained on; choose one above 0")
        if rewrites not in ("new", "keep"):
            raise ValueError(f"rewrites = {rewrites!r}: choose 'new' or 'keep'")
        if models is not None and (isinstance(models, str) or not models):
            raise ValueError(f"models = {models!r}: pass a tuple of names, or None for any")
        if idle_seconds is not None and not idle_seconds > 0:
            raise ValueError(f"idle_seconds = {idle_seconds}: it must be above 0, or None for no limit")
        self.models: Sequence[str] = models or ("policy",)
        self.max_model_len = max_model_len
        self.counts: Counter[str] = Counter()
        self._tokenizer, self._sampling, self._fixed = tokenizer, sampling, fixed_sampling
        self._any_model, self._rewrites, self._parse_calls = models is None, rewrites, parse_calls
        self._idle_seconds, self._address = idle_seconds, (host, port)
        self._sessions: dict[str, Session] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED)
        self._chats: dict[str, Chat] = {}
        self._root: str | None = None
        self._at_exit = contextlib.AsyncExitStack()

    # ---- sessions

    @property
    def root(self) -> str:
        """URL of the server, for programs that name their session in a header.

        Raises:
            RuntimeError: the gateway does not serve.
        """
        if self._root is None:
            raise RuntimeError(
                "the gateway does not serve: use it as `async with gateway:`, or in an episode of a Runner"
            )
        return self._root

    @contextlib.contextmanager
    def session(
        self, client: RolloutClient, *, name: str | None = None, max_requests: int | None = None
    ) -> Iterator[Session]:
        """Open a session of one program, and end it: requests under way are cancelled, and later ones refused.

        Args:
            client: generates the answers.
            name: id of the session, for a program that names it in ``X-Session-ID``. It must be hard to guess. By default it is random.
            max_requests: maximum number of requests that are answered or under way; ``None`` for no limit.

        Raises:
            RuntimeError: the gateway does not serve.
            ValueError: a session has this name.
        """
        name = name or secrets.token_urlsafe(24)
        base_url = f"{self.root}/sessions/{name}/v1"
        if name in self._sessions:
            raise ValueError(f"name = {name!r}: a session has this name; pass another one, or None for a random one")
        session = Session(name, base_url, client, MessageHistory(self._rewrites), max_requests)
        self._sessions[name] = session
        self._wait_for_requests(session)
        try:
            yield session
        finally:
            session.end()
            del self._sessions[name]
            if name in self._timers:
                self._timers.pop(name).cancel()
            self._ended.append(name)

    def find(self, name: str) -> Session:
        """Return the session of a request.

        Raises:
            RequestError: there is none of this name, or it was closed.
        """
        session = self._sessions.get(name)
        if session is None and name in self._ended:
            raise RequestError(410, "session_ended", f"session {name[:6]}... has ended; it answers no further request")
        if session is None:
            raise RequestError(
                404, "session_unknown", "no session has this URL, API key or X-Session-ID: use its base_url"
            )
        self._wait_for_requests(session)
        return session

    def count(self, error: RequestError, session: Session | None) -> None:
        """Count a request that was refused."""
        self.counts[error.reason] += 1
        if session is not None:
            session.counts[error.reason] += 1

    def _wait_for_requests(self, session: Session) -> None:
        """End a session when no request came for a time."""
        timer = self._timers.get(session.id)
        if timer is not None:
            timer.cancel()
        if self._idle_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[session.id] = loop.call_later(self._idle_seconds, self._end_if_idle, session)

    def _end_if_idle(self, session: Session) -> None:
        if session.busy:
            self._wait_for_requests(session)
            return
        if session.ended:
            return
        self.counts["timed_out"] += 1
        session.end(f"no request came for {self._idle_seconds:g} s")

    # ---- requests. Each is checked when the method is called, and answered when its result is awaited.

    def chat(self, session: Session, request: ChatRequest) -> Coroutine[Any, Any, dict[str, Any]]:
        """Answer messages.

        Raises:
            RequestError: the request cannot be answered, or not be trained on.
        """
        sampling = self._checked(request, request.model)
        chat = self._chat(request)
        return self._answer(session, request, chat, session.conversation(chat, request.sent_messages()), sampling)

    async def _answer(
        self, session: Session, request: ChatRequest, chat: Chat, talk: Conversation, sampling: Sampling
    ) -> dict[str, Any]:
        answers = await session.answers(chat, talk, sampling, request.n)
        choices = [
            replies.chat_choice(
                index,
                completion,
                answer,
                logprobs=bool(request.logprobs),
                decode=self._decode,
                token_ids=bool(request.return_token_ids),
            )
            for index, (completion, answer) in enumerate(answers)
        ]
        sampled = sum(len(completion.tokens) for completion, _ in answers)
        reply = replies.chat_reply(request.model or self.models[0], talk.tokens, choices, sampled)
        return {**reply, "prompt_token_ids": talk.tokens} if request.return_token_ids else reply

    def complete(self, session: Session, request: TextRequest) -> Coroutine[Any, Any, dict[str, Any]]:
        """Continue texts, or the tokens of texts. Raises what :meth:`chat` raises."""
        sampling = self._checked(request, request.model)
        prompts = request.prompts(self._tokenizer)
        if not prompts or not all(prompts):
            raise RequestError(
                400, "empty_prompt", "prompt is empty: an answer needs at least one token to go on from", "prompt"
            )
        return self._continue(session, request, prompts, sampling)

    async def _continue(
        self, session: Session, request: TextRequest, prompts: list[list[int]], sampling: Sampling
    ) -> dict[str, Any]:
        completions = await session.complete(prompts, sampling, request.n)
        return replies.text_reply(
            request.model or self.models[0],
            prompts,
            completions,
            self._decode,
            sampling.stop,
            logprobs=request.logprobs is not None,
            token_ids=bool(request.return_token_ids),
        )

    def generate(self, session: Session, request: TokenRequest) -> Coroutine[Any, Any, dict[str, Any]]:
        """Continue tokens, by vLLM's route. Raises what :meth:`chat` raises."""
        check_extra_fields(request, neutral={})
        sampling = self._checked(request.sampling_params, request.model)
        return self._generate(session, request, sampling)

    async def _generate(self, session: Session, request: TokenRequest, sampling: Sampling) -> dict[str, Any]:
        return replies.token_reply(await session.complete([request.token_ids], sampling, request.sampling_params.n))

    def _checked(self, request: Drawing, model: str | None) -> Sampling:
        """Return the sampling parameters of a request, or raise a :class:`RequestError`."""
        if not self._any_model and model is not None and model not in self.models:
            names = ", ".join(map(repr, self.models))
            raise RequestError(404, "model_not_found", f"model = {model!r}: this gateway serves {names}", "model")
        check_extra_fields(request, request.TAKEN)
        return request.sampling(self._sampling, fixed=self._fixed)

    def _chat(self, request: ChatRequest) -> Chat:
        """Return the template with the tools of a request: one object for equal tools."""
        tools, options = request.used_tools(), request.template_options()
        key = json.dumps([tools, options], sort_keys=True)
        if key not in self._chats:
            if len(self._chats) >= _CHATS:
                self._chats.pop(next(iter(self._chats)))
            try:
                self._chats[key] = Chat(self._tokenizer, tools, parse_calls=self._parse_calls, **options)
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(400, "invalid_tools", f"tools or chat template: {error}", "tools") from None
        return self._chats[key]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # ---- server

    async def __aenter__(self) -> Gateway:
        host, port = self._address
        listener = listen(host, port)
        config = uvicorn.Config(
            create_gateway_app(self), lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = EmbeddedServer(config)
        self._root = f"http://{host}:{listener.getsockname()[1]}"
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))

        async def stop() -> None:
            self._root = None
            server.should_exit = True
            for session in self._sessions.values():
                session.end("the gateway was closed")
            await serving
            listener.close()

        self._at_exit.push_async_callback(stop)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._at_exit.aclose()
