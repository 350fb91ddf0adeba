"""Command line: ``areal --help`` lists the commands. A command is imported when it runs: extras are needed by some only."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        function: ``module:function``. The function takes the options, and returns the exit code. That of a recipe takes its name first.
        summary: line of the help.
        install: what to install where a module is missing.
    """

    function: str
    summary: str
    install: str


COMMANDS = {
    "doctor": Command(
        "areal.cli.doctor.command:run_doctor",
        "check this environment, and train one step on two ranks against one",
        "areal",
    ),
    **{
        name: Command("areal.cli.run_recipe:run_recipe", summary, "areal[recipes]")
        for name, summary in (
            ("sft", "fine-tune a model on conversations"),
            ("dpo", "train a model on pairs of answers"),
            ("rm", "train a reward model on pairs of answers"),
            ("grpo", "reinforcement learning with a reward of yours"),
            ("ppo", "reinforcement learning with a critic"),
            ("distill", "learn from a teacher on own answers"),
        )
    },
    "plan": Command(
        "areal.cli.plan:run_plan", "predict memory, communication and time of a layout, and find the best ones", "areal"
    ),
    "reproduce": Command(
        "areal.cli.run_recipe:run_reproduce", "take the first steps of a run again, and compare", "areal[recipes]"
    ),
    "serve": Command("areal.cli.serve:run_serve", "serve a model to clients of the tinker SDK", "areal[tinker]"),
    "untie": Command(
        "areal.cli.untie:run_untie", "copy a model so that an adapter of its output head can be merged", "areal"
    ),
}


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="areal",
        description="Train engines for reinforcement learning.",
        epilog=f"commands:\n{listed}\n\nareal COMMAND --help prints the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the command")
    given = parser.parse_args()
    command = COMMANDS[given.command]
    module_name, _, function = command.function.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "areal":
            raise
        sys.exit(f"areal {given.command}: {error.name} is not installed: pip install '{command.install}'")
    run = getattr(module, function)
    sys.exit(run(given.command, given.options) if function == "run_recipe" else run(given.options))
