"""An OpenAI-compatible endpoint in front of a rollout, which records what was sampled: any agent program becomes an episode."""

from areal.inference.gateway.agent_program import AgentProgram
from areal.inference.gateway.gateway import Gateway
from areal.inference.gateway.session import Session

__all__ = ["AgentProgram", "Gateway", "Session"]
