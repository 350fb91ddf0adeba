"""Ranks in Ray actors: the placement of their processes, the calls to them, and the loss of one. Needs the extra ``ray``."""

from areal.dispatch.ray.workers import RayWorkers

__all__ = ["RayWorkers"]
