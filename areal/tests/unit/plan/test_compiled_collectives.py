"""The collectives of compiled programs, read from their text."""

from __future__ import annotations

from areal.plan.compiled_collectives import CompiledCollective, collectives, step_collectives
from areal.plan.step_recorder import Collective, CollectiveCalls

PROGRAM = """
%cond (p: (s32[], f32[4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(36)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%all-reduce-scatter.1 (input: f32[8,6]) -> f32[8,3] {
  %r = f32[8,6]{1,0:T(8,128)} all-reduce(%input), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %cut = f32[8,3]{1,0} dynamic-slice(%r, %zero, %place)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = bf16[10,3]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %s = f32[8,3]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (s32[], f32[4]) while(%t), condition=%cond, body=%body
  %known = (s32[], f32[4]) while(%t), condition=%other, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %pair = (f32[7]{0}, s32[2]{0}) all-reduce(%a, %b), replica_groups=mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}, to_apply=%add
  %start = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=mesh['a'=1,'b'=4] {'b'}, dimensions={0}
  %moved = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %alone = f32[9]{0} all-reduce(%a), replica_groups={{0},{1},{2},{3}}, to_apply=%add
}

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %e = pred[16]{0} all-to-all(%a), replica_groups={{0,1},{2,3}}, dimensions={0}
}
"""

DP, TP = ((0, 2), (1, 3)), ((0, 1), (2, 3))


def test_shapes_trips_and_groups() -> None:
    found = {(each.kind, each.shape): each for each in collectives(PROGRAM)}
    expected = [
        CompiledCollective("reduce-scatter", "f32", (8, 3), 36, DP),
        CompiledCollective("all-gather", "bf16", (10, 3), 36, DP),
        CompiledCollective("all-reduce", "f32", (7,), 1, TP),
        CompiledCollective("all-reduce", "s32", (2,), 1, TP, first=False),
        CompiledCollective("all-gather", "f32", (8,), 1, ((0, 1, 2, 3),)),
        CompiledCollective("collective-permute", "f32", (3,), 1, ((0, 1), (1, 0), (2, 3), (3, 2))),
        CompiledCollective("all-reduce", "f32", (9,), 1, ((0,), (1,), (2,), (3,))),
        CompiledCollective("all-to-all", "pred", (16,), 5, TP),
    ]
    assert found == {(each.kind, each.shape): each for each in expected}
    # A rank of a reduce-scatter has as much as it sends before.
    assert found["reduce-scatter", (8, 3)].nbytes == 8 * 6 * 4
    assert found["reduce-scatter", (8, 3)].elements(4) == 36 * 8 * 6
    assert found["all-to-all", (16,)].nbytes == 16


def test_step_has_calls_and_bytes_by_axis() -> None:
    mesh = {"r": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert step_collectives({PROGRAM: 3, "": 1}, mesh) == {
        Collective("reduce_scatter", "dp", 2, 2): CollectiveCalls(3 * 36, 3 * 36 * 192),
        Collective("all_gather", "dp", 2, 2): CollectiveCalls(3 * 36, 3 * 36 * 60),
        Collective("all_reduce", "tp", 2, 1): CollectiveCalls(3, 3 * (28 + 8)),
        Collective("all_gather", "dp+tp", 4, 1): CollectiveCalls(3, 3 * 32),
        Collective("collective_permute", "tp", 2, 1): CollectiveCalls(3, 3 * 12),
        Collective("all_to_all", "tp", 2, 1): CollectiveCalls(15, 15 * 16),
    }
