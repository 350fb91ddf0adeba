"""Placement: several models and rollouts take turns on devices that cannot hold all of them."""

from areal.dispatch.shared_devices.devices import SharedDevices
from areal.dispatch.shared_devices.placement import Placement
from areal.dispatch.shared_devices.shared_rollout import SharedRollout, Sleeper
from areal.dispatch.shared_devices.uses import Kind, Move, Need, Part, Use

__all__ = ["Kind", "Move", "Need", "Part", "Placement", "SharedDevices", "SharedRollout", "Sleeper", "Use"]
