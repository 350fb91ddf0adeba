"""`areal sft|dpo|rm|grpo|ppo|distill CONFIG.toml key=value ...`: a run from a file."""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import run as run_torchrun

from areal import recipes
from areal.api.sections.strict import StrictConfig
from areal.engine.options import engine_config, process_dims
from areal.engine.registry import engine_class
from areal.recipes.config import RunConfig, merged, toml_value
from areal.recipes.interrupt import EXIT_CODE
from areal.utils.distributed import is_rank

_RECIPES = {
    "sft": ("SFTConfig", "SFTRun"),
    "dpo": ("DPOConfig", "DPORun"),
    "rm": ("RewardModelConfig", "RewardModelRun"),
    "grpo": ("GRPOConfig", "GRPORun"),
    "ppo": ("PPOConfig", "PPORun"),
    "distill": ("DistillConfig", "DistillRun"),
}
"""Settings and run of each command, in ``areal.recipes``. The run is imported where it runs: the process that starts ranks needs none."""
_FLAGS: dict[str, dict[str, Any]] = {"--resume": {"resume": True}, "--ray": {"workers": "ray"}}
_SHUTDOWN_SECONDS = 3600
"""Longest step after a first Ctrl-C. A second one ends the ranks at once."""
_USAGE = """usage: areal {name} [CONFIG.toml] [key=value ...] [--dry-run] [--resume] [--ray]

A key names a setting of the file, such as lr=1e-6 or engine.activation_checkpointing=full, and replaces it; key= leaves it out.
Without torchrun, the processes of the layout are started on this machine.

  --dry-run  check everything, print the settings, memory and the first row as the model sees it; train nothing
  --resume   continue from the newest checkpoint in the output directory
  --ray      start the processes in Ray

settings:
{settings}"""
_REPRODUCE_USAGE = """usage: areal reproduce RUN [STEPS] [key=value ...] [tolerance=NUMBER]

Take the first steps of the run in the directory RUN again (5 by default), and compare their numbers: to the bit, or with a tolerance.
A key names a setting that differs, such as backend=megatron:t2: other layouts have the same numbers up to rounding."""


def run_recipe(name: str, options: Sequence[str]) -> int:
    """Run a recipe with the options of the command line. Returns the exit code.

    Args:
        name: ``sft``, ``dpo``, ``rm``, ``grpo``, ``ppo`` or ``distill``.
        options: options behind the name.
    """
    config_name, run_name = _RECIPES[name]
    config_class: type[RunConfig] = getattr(recipes, config_name)
    if "--help" in options or "-h" in options or not options:
        print(_USAGE.format(name=name, settings=settings_help(config_class)))
        return 0
    try:
        config = config_class(**read_settings(options))
        if "--dry-run" in options:
            print(import_module("areal.recipes.describe").description(getattr(recipes, run_name)(config)))
            return 0
        if (processes := _processes(config)) > 1 and not is_rank():
            return _run_ranks(processes, name, options)
        getattr(recipes, run_name)(config).train()
    except KeyboardInterrupt:
        print(f"areal {name}: interrupted", file=sys.stderr)
        return EXIT_CODE
    except ValueError as error:
        return _fail(name, _message(error))
    return 0


def run_reproduce(options: Sequence[str]) -> int:
    """Run ``areal reproduce RUN [STEPS] [key=value ...]``. Returns exit code 1 if a number differs."""
    if not options or options[0].startswith("-"):
        print(_REPRODUCE_USAGE)
        return 0 if options[:1] in (["-h"], ["--help"]) else 2
    module = import_module("areal.recipes.reproduce")
    try:
        steps = int(options[1]) if options[1:2] and options[1].isdigit() else 5
        changes = read_settings([option for option in options[1:] if not option.isdigit()])
        tolerance = float(changes.pop("tolerance", 0.0))
        with tempfile.TemporaryDirectory(prefix="areal-reproduce-") as output:
            recorded = module.read_record(Path(options[0]), Path(output), changes)
            config_name, run_name = _RECIPES[recorded.recipe]
            config: RunConfig = getattr(recipes, config_name)(**recorded.settings)
            if (processes := _processes(config)) > 1 and not is_rank():
                return _run_ranks(processes, "reproduce", options)
            compared = module.compare(recorded, getattr(recipes, run_name)(config), steps, tolerance)
    except ValueError as error:
        return _fail("reproduce", _message(error))
    if compared is None:
        return 0
    same = f"differ by {compared.largest:.1e} at most" if compared.largest else "are the same to the bit"
    print("\n".join(compared.lines) or f"the first {compared.steps} steps {same}")
    return int(bool(compared.lines))


def read_settings(options: Sequence[str]) -> dict[str, Any]:
    """Return the settings of files and of ``key=value`` options, later ones first.

    Raises:
        ValueError: an option is no file, setting or flag; a file is missing, or no TOML.
    """
    settings: dict[str, Any] = {}
    # Flags last: a file may have these settings too, as that of a record.
    for option in sorted(options, key=lambda option: option in _FLAGS):
        if option in _FLAGS:
            settings |= _FLAGS[option]
        elif option.endswith(".toml") and ("=" not in option or Path(option).is_file()):
            settings = merged(settings, _read(Path(option)))
        elif "=" in option and not option.startswith("-"):
            key, _, text = option.partition("=")
            _set(settings, key.split("."), text)
        elif option != "--dry-run":
            raise ValueError(f"{option!r}: expected a file CONFIG.toml, key=value, --dry-run, --resume or --ray")
    return settings


def settings_help(config_class: type[StrictConfig]) -> str:
    """Return a line per setting: name, default and meaning."""
    lines = []
    for name, field in config_class.model_fields.items():
        default = "required" if field.is_required() else _shown(field.get_default())
        lines.append(f"  {name} ({default}): {field.description}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return a value in TOML's form; ``none`` for a setting that is left out."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return json.dumps(value, default=str)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def _set(settings: dict[str, Any], keys: Sequence[str], text: str) -> None:
    """Set a value, or remove it if the text is empty."""
    for depth, key in enumerate(keys[:-1], 1):
        if not text and key not in settings:
            return
        value = settings.setdefault(key, {})
        if not isinstance(value, dict):
            table = ".".join(keys[:depth])
            raise ValueError(
                f"{'.'.join(keys)}={text}: {table} = {value!r} is no table; set or leave out {table} itself"
            )
        settings = value
    if text:
        settings[keys[-1]] = toml_value(text)
    else:
        settings.pop(keys[-1], None)


def _processes(config: RunConfig) -> int:
    """Return the number of processes that the layout needs on this machine."""
    if config.workers == "ray":
        return 1
    engine = engine_class(config.engine_config().dims.backend)
    return process_dims(engine, engine_config(engine, config.engine_config())).world_size


def _run_ranks(processes: int, name: str, options: Sequence[str]) -> int:
    """Run this command on each rank, by torchrun, which passes signals on to them. Returns the exit code: that of the ranks, if it is one."""
    parser = get_args_parser()
    command = ["--standalone", "--nproc-per-node", str(processes)]
    # After Ctrl-C, ranks end after their step, with a checkpoint. Older releases of torchrun kill them after 30 s.
    if "--shutdown-timeout" in parser.format_help():
        command += ["--shutdown-timeout", str(_SHUTDOWN_SECONDS)]
    try:
        run_torchrun(parser.parse_args([*command, "-m", "areal.cli", name, *options]))
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if len(set(codes.values())) == 1 and min(codes.values()) > 0:
            return min(codes.values())
        return _fail(name, f"exit codes of the ranks that failed first: {codes}; their messages are above")
    return 0


def _message(error: ValueError) -> str:
    """Return the text of an error; of wrong settings one line each, without what pydantic says about its own documentation."""
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for each in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, each["loc"]))
        text = each["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {text}" if place else text)
    return "\n".join(lines)


def _fail(name: str, text: str) -> int:
    print(f"areal {name}: {text}", file=sys.stderr)
    return 1
