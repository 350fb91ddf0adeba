"""Limits of request bodies, and decompression."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import httpx2
import pytest
import zstandard

from areal.tests.tinker.api.bodies import PROTOBUF, cross_entropy_request
from areal.tests.tinker.api.stand_in import StandInService, client_of
from areal.tinker.api.error_replies import BodyError
from areal.tinker.api.middleware import decompress

BODY = cross_entropy_request().SerializeToString()
ZSTD = {**PROTOBUF, "Content-Encoding": "zstd"}


def streamed(data: bytes) -> bytes:
    """Compress without the size in the frame's header."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def post(route: str, content: Any, headers: dict[str, str], **settings: Any) -> tuple[httpx2.Response, StandInService]:
    async def run() -> tuple[httpx2.Response, StandInService]:
        service = StandInService()
        async with client_of(service, **settings) as client:
            return await client.post(f"/api/v1/{route}", content=content, headers=headers), service

    return asyncio.run(run())


@pytest.mark.parametrize("compress", [zstandard.compress, streamed])
def test_zstd_bodies(compress: Any) -> None:
    assert decompress(compress(BODY), len(BODY)) == BODY
    assert decompress(compress(b""), 1) == b""
    answer, service = post("forward_backward", compress(BODY), ZSTD)
    assert answer.status_code == 200
    assert service.submitted[0].seq_id == 3


@pytest.mark.parametrize("compress", [zstandard.compress, streamed])
def test_a_bomb_is_refused_before_it_is_expanded(compress: Any) -> None:
    """A gigabyte of zeros in some kilobytes: memory grows by less than the limit and one step."""
    bomb = compress(bytes(2**30))
    assert len(bomb) * 1000 < 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BodyError, match="expands") as caught:
        decompress(bomb, 2**20)
    assert caught.value.status == 413
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    answer, _ = post("forward_backward", bomb, ZSTD)
    assert answer.status_code == 413
    assert "limit" in answer.json()["error"]


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"no frame",
        zstandard.compress(BODY)[:-3],
        streamed(BODY)[:-3],
        zstandard.compress(BODY) + b"more",
        zstandard.compress(BODY) * 2,
        streamed(bytes(2000) + BODY * 30) + bytes(600),
    ],
)
def test_damaged_zstd_is_a_bad_request(damaged: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        decompress(damaged, 2**20)
    assert caught.value.status == 400
    assert post("forward_backward", damaged, ZSTD)[0].status_code == 400


def test_a_frame_whose_window_is_huge_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    huge = stream.compress(bytes(2**20)) + stream.flush()
    with pytest.raises(BodyError):
        decompress(huge, 2**24)


def test_limits_by_route() -> None:
    limits = {"max_body_bytes": 4096, "max_json_bytes": 1024}
    assert post("forward_backward", bytes(5000), PROTOBUF, **limits)[0].status_code == 413
    assert post("asample", bytes(2000), {}, **limits)[0].status_code == 413
    assert post("forward_backward", bytes(2000), PROTOBUF, **limits)[0].status_code == 400

    async def endless() -> Any:
        while True:
            yield bytes(1000)

    answer, _ = post("forward_backward", endless(), PROTOBUF, **limits)
    assert answer.status_code == 413


def test_other_encodings_are_refused() -> None:
    assert post("forward_backward", BODY, {**PROTOBUF, "Content-Encoding": "gzip"})[0].status_code == 415
