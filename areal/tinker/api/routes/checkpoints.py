"""Routes of training runs and their checkpoints: listing, expiry, deletion, download."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, StreamingResponse

from areal.tinker.api import schemas
from areal.tinker.api.context import ApiContext, Context, Identifier, Limit, Offset, ServiceDependency
from areal.tinker.api.error_replies import BodyError
from areal.tinker.api.http_settings import MIB
from areal.tinker.service.tenants.caller import SERVER

checkpoint_routes = APIRouter(prefix="/api/v1", tags=["checkpoints"])
download_routes = APIRouter(tags=["checkpoints"])


@checkpoint_routes.post("/weights_info")
async def weights_info(body: schemas.PathBody, service: ServiceDependency) -> dict[str, Any]:
    """Describe the adapter of a checkpoint."""
    return await service.weights_info(body.tinker_path)


@checkpoint_routes.get("/training_runs")
async def training_runs(service: ServiceDependency, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """List training runs, the most recent first."""
    return await service.training_runs(limit, offset)


@checkpoint_routes.get("/training_runs/{run_id}")
async def training_run(run_id: Identifier, service: ServiceDependency) -> dict[str, Any]:
    """Describe a training run."""
    return await service.training_run(run_id)


@checkpoint_routes.get("/checkpoints")
async def all_checkpoints(service: ServiceDependency, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """List the checkpoints of all runs of the caller, the newest first."""
    return await service.all_checkpoints(limit, offset)


RUN = "/training_runs/{run_id}/checkpoints"
CHECKPOINT = RUN + "/{kind}/{name}"


@checkpoint_routes.get(RUN)
async def checkpoints(run_id: Identifier, service: ServiceDependency) -> dict[str, Any]:
    """List the checkpoints of a run."""
    return await service.checkpoints(run_id)


@checkpoint_routes.put(CHECKPOINT + "/ttl")
async def set_ttl(
    run_id: Identifier, kind: Identifier, name: Identifier, body: schemas.TtlBody, service: ServiceDependency
) -> None:
    """Let a checkpoint expire after some seconds, or never (null)."""
    await service.set_ttl(run_id, f"{kind}/{name}", body.ttl_seconds)


@checkpoint_routes.post(CHECKPOINT + "/publish")
async def publish(run_id: Identifier, kind: Identifier, name: Identifier, service: ServiceDependency) -> None:
    """Let all callers read a checkpoint."""
    await service.publish(run_id, f"{kind}/{name}")


@checkpoint_routes.delete(CHECKPOINT + "/publish")
async def unpublish(run_id: Identifier, kind: Identifier, name: Identifier, service: ServiceDependency) -> None:
    """Let only the owner read a checkpoint."""
    await service.unpublish(run_id, f"{kind}/{name}")


@checkpoint_routes.delete(CHECKPOINT)
async def delete_checkpoint(run_id: Identifier, kind: Identifier, name: Identifier, service: ServiceDependency) -> None:
    """Delete a checkpoint."""
    await service.delete_checkpoint(run_id, f"{kind}/{name}")


# ---- archives, which are written while they are sent

FILE_PIECE_BYTES = MIB
ARCHIVE_END = bytes(2 * tarfile.BLOCKSIZE)


def _header(folder: Path, name: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = (folder / name).stat().st_size
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def archive_bytes(folder: Path, names: Sequence[str]) -> int:
    """Return the size of the archive of files in a folder."""
    sizes = [(folder / name).stat().st_size for name in names]
    return (
        sum(len(_header(folder, name)) for name in names)
        + sum(size + _padding(size) for size in sizes)
        + len(ARCHIVE_END)
    )


def archive_pieces(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the archive of files in a folder, in pieces."""
    for name in names:
        yield _header(folder, name)
        size = 0
        with (folder / name).open("rb") as file:
            while piece := file.read(FILE_PIECE_BYTES):
                size += len(piece)
                yield piece
        yield bytes(_padding(size))
    yield ARCHIVE_END


# ---- download


def _link(request: Request, context: ApiContext, checkpoint: str, file: str) -> tuple[str, str]:
    """Return a link to a file of a checkpoint, or to all as an archive (``file`` is empty), and its expiry."""
    query = {"file": file, **context.links.sign(checkpoint, file)}
    expires = datetime.fromtimestamp(int(query["expires"]), UTC).isoformat()
    return f"{request.base_url}download/{quote(checkpoint)}?{urlencode(query)}", expires


@checkpoint_routes.get(CHECKPOINT + "/archive")
async def archive(
    run_id: Identifier,
    kind: Identifier,
    name: Identifier,
    request: Request,
    context: Context,
    service: ServiceDependency,
) -> dict[str, Any]:
    """Return a link to a tar archive of a checkpoint, which needs no key until it expires."""
    await service.checkpoint_folder_of(run_id, f"{kind}/{name}")
    url, expires = _link(request, context, f"{run_id}/{kind}/{name}", "")
    return {"url": url, "expires": expires}


@checkpoint_routes.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(
    run_id: Identifier,
    kind: Identifier,
    name: Identifier,
    request: Request,
    context: Context,
    service: ServiceDependency,
) -> dict[str, Any]:
    """Return a link to each file of a checkpoint."""
    folder = await service.checkpoint_folder_of(run_id, f"{kind}/{name}")
    files = await asyncio.to_thread(lambda: sorted(_relative_files(folder)))
    links = {file: _link(request, context, f"{run_id}/{kind}/{name}", file) for file in files}
    expires = next((expires for _, expires in links.values()), datetime.now(UTC).isoformat())
    return {"urls": {file: url for file, (url, _) in links.items()}, "expires": expires}


def _relative_files(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@download_routes.get("/download/{run_id}/{kind}/{name}")
async def download(
    run_id: Identifier,
    kind: Identifier,
    name: Identifier,
    context: Context,
    expires: Annotated[str, Query(pattern=r"^[0-9]{1,12}$")],
    signature: Annotated[str, Query(max_length=128)],
    file: Annotated[str, Query(max_length=1024)] = "",
) -> Any:
    """Send a file of a checkpoint, or all as a tar archive, to the bearer of a link of this server."""
    if not context.links.accepts(expires, signature, f"{run_id}/{kind}/{name}", file):
        raise BodyError(403, "The link is not valid or has expired: ask for a new one.")
    folder = await context.service.for_caller(SERVER).checkpoint_folder_of(run_id, f"{kind}/{name}")
    if file:
        # The signature covers the name: it is one that this server listed.
        return FileResponse(folder / file)
    files = await asyncio.to_thread(lambda: sorted(_relative_files(folder)))
    headers = {
        "Content-Length": str(archive_bytes(folder, files)),
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(name)}.tar",
    }
    return StreamingResponse(archive_pieces(folder, files), media_type="application/x-tar", headers=headers)
