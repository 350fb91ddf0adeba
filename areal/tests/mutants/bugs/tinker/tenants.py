"""Bugs of owners, quotas and full disks that the suite must catch."""

from __future__ import annotations

from areal.tests.mutants.planting import Function, mutant

TENANTS = "tinker/api/test_tenants.py::"
DISK = "unit/tinker/service/test_full_disk.py::"
ROUTES = TENANTS + "test_identifiers_of_another_user_are_unknown_on_every_route"


@mutant("areal.tinker.service.tenants.caller:Caller.may_use", ROUTES)
def objects_of_all_owners(right: Function) -> Function:
    """An identifier is enough to use what belongs to another owner."""
    return lambda self, owner: True


@mutant("areal.tinker.service.tenants.caller_service:CallerService.heartbeat", ROUTES)
def a_route_without_the_check(right: Function) -> Function:
    """One route forgets to check its identifier."""

    async def wrong(self: object, session_id: str) -> None:
        self.parts.sessions.touch(session_id)  # type: ignore[attr-defined]

    return wrong


@mutant(
    "areal.tinker.service.checkpoints:CheckpointRegistry.is_public",
    TENANTS + "test_a_public_checkpoint_is_read_by_all_and_changed_by_its_owner",
)
def private_checkpoint_read_by_all(right: Function) -> Function:
    """A checkpoint is public whatever its owner says."""

    async def wrong(self: object, path: object) -> bool:
        return True

    return wrong


@mutant("areal.tinker.service.tenants.caller:stored_bytes", TENANTS + "test_quota_of_stored_bytes")
def replaced_checkpoint_counted(right: Function) -> Function:
    """An overwrite needs room for both checkpoints."""
    return lambda connection, owner, replaced=None: right(connection, owner, None)


@mutant("areal.tinker.service.store.futures:Futures._stop_waiting", TENANTS + "test_quota_of_queued_tokens")
def tokens_queued_for_ever(right: Function) -> Function:
    """Tokens of requests with a result still count as queued."""
    return lambda self, request_id: self._waiting.pop(request_id, None)


@mutant("areal.tinker.service.store.disk:DiskReserve.release", DISK + "test_on_a_full_disk_only_saves_fail")
def reserve_never_released(right: Function) -> Function:
    """The reserve stays on a full disk, and nothing can be stored."""
    return lambda self: False


@mutant("areal.tinker.service.store.database:Database.check_room", DISK + "test_on_a_full_disk_only_saves_fail")
def saves_use_the_reserve(right: Function) -> Function:
    """Saves are tried while the only room is the database's."""
    return lambda self: None
