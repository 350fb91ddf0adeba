"""Command line: ``areal --help`` lists the commands."""

from __future__ import annotations

try:
    from tyro.extras import SubcommandApp

    from areal.cli.serve import run_server
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name}: the command line needs pip install 'areal[tinker]'", name=error.name
    ) from None


def main() -> None:
    """Run the command that the arguments name."""
    commands = SubcommandApp()
    commands.command(name="serve")(run_server)
    commands.cli(prog="areal", description="Train engines for reinforcement learning.")
