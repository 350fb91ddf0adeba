"""verifiers: its tasksets and harnesses as episodes of a :class:`~areal.trainer.rollout.Runner`."""

from areal.integrations.verifiers.episode import VerifiersEpisode

__all__ = ["VerifiersEpisode"]
