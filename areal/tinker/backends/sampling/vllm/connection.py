"""Connection to a vLLM server: the check of the server at the start, adapters as it reads them, and its errors."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from areal.inference.http.server_connection import RejectedCall, ServerConnection, StatusError, Unavailable
from areal.inference.http.servers.http_call import HTTPCall, ModelList, ServedCard
from areal.inference.protocol import Sampling
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SamplingRequest
from areal.tinker.backends.sampling.sampler_config import VLLMSamplerConfig, check_adapter_base
from areal.tinker.backends.sampling.vllm.completions import completion_call

_START_SECONDS = 30.0
"""Time limit of each of the first requests."""

_PROBE = SamplingRequest((0, 1, 2, 3))
"""Request that checks which log-probs the server returns."""

_RAW = 1e-4
"""With one token left to draw, a log-prob further from 0 is one before ``top_k``."""


def connect(settings: VLLMSamplerConfig, url: str) -> ServerConnection:
    """Return a connection with the key of the settings."""
    headers = {}
    if settings.api_key_file is not None:
        try:
            headers["Authorization"] = f"Bearer {Path(settings.api_key_file).read_text().strip()}"
        except OSError as error:
            raise ValueError(
                f"sampler_config.api_key_file = {settings.api_key_file!r} cannot be read: {error}"
            ) from error
    return ServerConnection(url, headers)


async def first_contact(settings: VLLMSamplerConfig, model: str) -> list[ServedCard]:
    """Return the description of the base model by each server.

    Raises:
        ValueError: a server cannot be reached, has another model, or returns log-probs before ``top_k``.
    """
    return list(await asyncio.gather(*(_first_contact(settings, url, model) for url in settings.url)))


async def _first_contact(settings: VLLMSamplerConfig, url: str, model: str) -> ServedCard:
    server = connect(settings, url)
    try:
        listed = await server.send(HTTPCall.get("/v1/models", ModelList), _START_SECONDS)
        card = _base_card(listed, settings, url, model)
        # With one token left to draw, its log-prob is 0.
        call = completion_call(card.id, _PROBE, Sampling(1, top_k=1, stop_token_ids=()), scored=False)
        answer = (await server.send(call, _START_SECONDS)).choices[0]
    except (RuntimeError, StatusError) as error:
        raise ValueError(
            f"sampler_config.url = {url!r}: {error}. Start vLLM there before this server, or correct the address"
        ) from error
    finally:
        server.close()
    if answer.logprobs is None or any(value < -_RAW for value in answer.logprobs.token_logprobs):
        raise ValueError(
            f"sampler_config.url = {url!r}: the server's log-probs are those before top_k, top_p and temperature: start it with "
            "--logprobs-mode processed_logprobs"
        )
    return card


def _base_card(listed: ModelList, settings: VLLMSamplerConfig, url: str, model: str) -> ServedCard:
    """Return the base model among those that a server lists."""
    cards = [card for card in listed.data if card.parent is None]
    if settings.served_name is not None:
        for card in cards:
            if card.id == settings.served_name:
                return card
        names = ", ".join(card.id for card in cards)
        raise ValueError(f"sampler_config.served_name = {settings.served_name!r}: {url} has {names}")
    if not cards or Path(cards[0].root or cards[0].id).name != Path(model).name:
        names = ", ".join(card.root or card.id for card in cards)
        raise ValueError(
            f"sampler_config.url = {url!r} has the model {names}, and this server has {model!r}: start vLLM with this model, or "
            "name it by served_name if it is the same"
        )
    return cards[0]


def copy_adapter(folder: Path, copy: Path, model: str, max_rank: int) -> None:
    """Copy an adapter.

    Raises:
        ValueError, OSError: the folder is damaged, of another base model, or has what the server would ignore.
    """
    check_adapter_base(folder, model)
    copy.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(folder / name, copy / name)
    config = json.loads((copy / "adapter_config.json").read_bytes())
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise ValueError(
                f"{name} in adapter_config.json is not empty, and vLLM ignores it: use one rank for all layers"
            )
    if config.get("r", 0) > max_rank:
        raise ValueError(
            f"its rank is {config['r']}, and the sampler's max_rank is {max_rank}: create a model of a smaller lora rank, or raise "
            "max_rank and --max-lora-rank of vLLM"
        )
    try:
        with safe_open(copy / "adapter_model.safetensors", framework="np") as file:
            file.keys()
    except SafetensorError as error:
        raise ValueError(f"adapter_model.safetensors is damaged: {error}") from error


def as_error(error: StatusError) -> UserError | ServerError:
    """Return the error of a request for an answer that the server refused."""
    reason = reason_of(error)
    if "not JSON compliant" in reason:
        return UserError("the log-probs are not finite: the weights have diverged. Go back to an earlier checkpoint")
    if isinstance(error, RejectedCall):
        return UserError(f"the inference server refuses the request: {reason}")
    return ServerError(f"the inference server answered with status {error.status}: {reason}")


def reason_of(error: StatusError | Unavailable) -> str:
    """Return the message in a reply's body, or the body."""
    try:
        content = json.loads(error.text)
    except ValueError:
        return error.text
    inner = content.get("error", content) if isinstance(content, dict) else content
    found = (inner.get("message") or inner.get("detail")) if isinstance(inner, dict) else None
    return str(found or error.text)
