"""Settings of the server and options of ``areal serve``: each setting has an option with a description."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from areal.cli.serve import ServeOptions, parse_options, run_serve, server_config
from areal.tests.tinker.api.stand_in import StandInService
from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.service.settings import ServiceSettings

RENAMED = {
    "base_models": "name",
    "model_path": "model",
    "database_url": "database",
    "users": "api_key_file",
    "quotas": "api_key_file",
    "max_body_bytes": "max_body_mib",
    "max_json_bytes": "max_json_mib",
}
"""Options that have another name than the setting."""

TEXTS = {
    **{"base_models": "other", "model_path": "other", "root": "other", "database_url": "sqlite://", "owner": "other"},
    **{"allowed_hosts": "train.example.org"},
}
"""Values of settings that are not numbers."""

BASE = ["--model", "tiny"]


def settings_of(options: ServeOptions) -> dict[str, Any]:
    """Return all settings of the server."""
    return {**vars(options.api_settings), **vars(options.service_settings)}


def option_of(setting: str) -> str:
    """Return the option of a setting."""
    return "--" + RENAMED.get(setting, setting).replace("_", "-")


def without_option(settings: type, keys: Path) -> Iterator[str]:
    """Yield a line for each field of a class of settings that the command does not set."""
    before = settings_of(parse_options(BASE))
    for field in dataclasses.fields(settings):
        option, values = option_of(field.name), {**TEXTS, "users": str(keys), "quotas": str(keys)}
        value = values.get(field.name) or str(int(before.get(field.name, 0)) % 2**10 + 1)
        given = [option.replace("--", "--no-")] if before.get(field.name) is True else [option, value]
        try:
            after = settings_of(parse_options([*BASE, *given]))
        except SystemExit:
            after = before
        if field.name not in after or after[field.name] == before[field.name]:
            yield (
                f"{settings.__name__}.{field.name}: add {option} to areal/cli/serve.py or to ServiceLimits, or make it a constant"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureSettings(ServiceSettings):
    """Settings with one that the command does not know."""

    max_futures: int = 1


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text("tml-key-of-the-tests\n")
    return tmp_path / "keys"


@pytest.mark.parametrize("settings", [ServiceSettings, ApiSettings])
def test_each_setting_has_an_option(settings: type, keys: Path) -> None:
    assert list(without_option(settings, keys)) == []


def test_a_setting_without_an_option_is_named(keys: Path) -> None:
    (line,) = without_option(FutureSettings, keys)
    assert line.startswith("FutureSettings.max_futures: add --max-futures to areal/cli/serve.py")


def test_each_option_is_described(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # a wider help has two columns
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    lines = [line.strip("│ \n") for line in capsys.readouterr().out.splitlines()]
    for field in dataclasses.fields(ServiceSettings) + dataclasses.fields(ApiSettings):
        option = option_of(field.name)
        (start,) = (i for i, line in enumerate(lines) if line.split(" ")[0].rstrip(",") == option)
        # The description is on the line of the option, or on the next one.
        text = lines[start].partition("  ")[2].strip() or lines[start + 1]
        assert text[0].isupper(), (option, text)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--hold-s", "45", "hold_s=45.0 must be above 0 and below 45"),
        ("--max-json-mib", "0", "max_json_bytes=0 must be at least 1"),
        ("--max-queued", "0", "max_queued is 0: it must be above 0"),
    ],
)
def test_a_setting_out_of_range_is_named(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_serve([*BASE, option, value])
    assert message in f"{caught.value.code} {capsys.readouterr().err}"


def test_relative_path_of_a_model_is_published_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients load their tokenizer by it, from another directory."""
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = parse_options(["--model", "models/tiny"]).service_settings
    absolute = str(tmp_path / "models" / "tiny")
    assert (settings.model_path, settings.base_models) == (absolute, (absolute, "models/tiny", "tiny"))
    assert parse_options(["--model", "org/tiny"]).service_settings.base_models == ("org/tiny", "tiny")


LINK = "/api/v1/training_runs/s:train:0/checkpoints/weights/saved/archive"


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ([], "http://train.example.org/"),
        (["--trusted-proxies", "10.0.0.0/8"], "http://train.example.org/"),  # the header is of another address
        (["--trusted-proxies", "127.0.0.1"], "https://train.example.org/"),
        (["--allowed-hosts", "another.example.org"], ""),
    ],
)
def test_links_behind_a_proxy(options: list[str], begins: str, tmp_path: Path) -> None:
    """They have the scheme that a proxy names which the operator knows, and no host that he does not know."""
    parsed = parse_options([*BASE, *options])
    config = server_config(create_app(cast(Any, StandInService(tmp_path)), parsed.api_settings), parsed)
    config.load()

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=config.loaded_app, client=("127.0.0.1", 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://train.example.org") as client:
            return await client.get(LINK, headers={"X-Forwarded-Proto": "https"})

    answer = asyncio.run(ask())
    assert answer.json()["url"].startswith(begins) if begins else answer.status_code == 400
