"""Placement: several models and rollouts take turns on devices that cannot hold all of them."""

from areal.dispatch.placement.placement import Placement
from areal.dispatch.placement.shared_devices import SharedDevices
from areal.dispatch.placement.shared_rollout import SharedRollout, Sleeper
from areal.dispatch.placement.uses import Action, Kind, Move, Need, Part, Use

__all__ = ["Action", "Kind", "Move", "Need", "Part", "Placement", "SharedDevices", "SharedRollout", "Sleeper", "Use"]
