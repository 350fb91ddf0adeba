"""Record of a run: settings, code, versions and machine, written before the run begins."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import tomli_w
import torch

from areal.recipes.config import RunConfig
from areal.recipes.record.evaluations import EVALUATIONS
from areal.recipes.record.replaced_file import replaced
from areal.recipes.record.secrets import public_command, public_settings

SETTINGS, STARTS, DIFF = "config.toml", "starts.jsonl", "code.diff"
"""Files of the record: the settings; an object for each start of the run; and uncommitted changes of the code."""

_PACKAGES = ("areal", "torch", "transformers", "numpy", "megatron-core", "jax", "vllm", "ray", "datasets")
_VARIABLES = ("CUDA_", "NCCL_", "OMP_", "MKL_", "XLA_", "JAX_", "PYTORCH_", "TORCH_", "TOKENIZERS_")
"""Beginnings of the names of environment variables that change results or speed."""
_MAY_DIFFER: tuple[str, ...] = (
    "resume",
    "steps",
    "epochs",
    "output",
    "eval_every",
    "patience",
    "keep_best",
    "checkpoint_every",
)
_MAY_DIFFER += ("keep_checkpoints", "save_model", "trackers", "wandb", "mlflow", "backend", "workers", "ray", "engine")
_MAY_DIFFER += ("profile", "max_losses", "max_tokens_per_mb", "servers", "start_server", "rollout", "logged_groups")
"""Settings with which a run may go on otherwise than it began. Others would make it another run, or are checked where they are used."""


def start_record(config: RunConfig, recipe: str, fingerprints: Mapping[str, str]) -> None:
    """Write the record of a run, or add a start to it. Called by one rank, after :func:`check_record`.

    Args:
        config: settings of the run.
        recipe: name of the recipe, such as ``grpo``.
        fingerprints: hash of the rows, by the name of their setting.
    """
    folder = config.output
    folder.mkdir(parents=True, exist_ok=True)
    diff = code_diff()
    for name, text in ((SETTINGS, tomli_w.dumps(settings_of(config))), (DIFF, diff)):
        with replaced(folder / name) as draft:
            draft.write_text(text, encoding="utf-8")
    start = {
        "recipe": recipe,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": public_command(sys.argv),
        "folder": os.getcwd(),
        "code": revision(),
        "changed": bool(diff),
        "rows": dict(fingerprints),
        "ranks": config.engine_config().dims.world_size,
        "dtype": config.compute_dtype,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "host": socket.gethostname(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    if not config.resume:
        (folder / EVALUATIONS).unlink(missing_ok=True)
    with (folder / STARTS).open("a" if config.resume else "w", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def check_rows_of_record(config: RunConfig, fingerprints: Mapping[str, str]) -> None:
    """Check that a run that is resumed goes on with the rows with which it began. Called by every rank.

    Raises:
        ValueError: the rows differ.
    """
    starts = config.output / STARTS
    if not starts.exists():
        return
    began = json.loads(starts.read_text(encoding="utf-8").splitlines()[0])["rows"]
    for name, fingerprint in fingerprints.items():
        if began.get(name) != fingerprint:
            raise ValueError(
                f"{name}: the rows are not those with which the run in {str(config.output)!r} began: go on with these, or begin another run in "
                "another output"
            )


def check_record(config: RunConfig) -> None:
    """Check that a run may begin, or go on, in its directory. Called by every rank.

    Raises:
        ValueError: there are checkpoints, and ``config.resume`` is not set; or it is, and settings differ from those with which the run
            began.
    """
    found = sorted((config.output / "checkpoints").glob("*/step-*[0-9]"))
    if found and not config.resume:
        raise ValueError(
            f"output = {str(config.output)!r} has checkpoints, such as {found[-1].name}: set resume = true to continue, or choose "
            "another output"
        )
    record = config.output / SETTINGS
    if not (config.resume and record.exists()):
        return
    earlier, settings = tomllib.loads(record.read_text(encoding="utf-8")), settings_of(config)
    for name in sorted(earlier.keys() | settings.keys()):
        before, now = earlier.get(name), settings.get(name)
        if name not in _MAY_DIFFER and before != now:
            raise ValueError(
                f"{name} = {now!r}, and the run in {str(config.output)!r} began with {before!r}: go on with that, or begin another run in "
                "another output"
            )


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the public settings as a TOML document: without those that are None, which a document cannot have."""
    return _without_none(public_settings(config))


def revision() -> str | None:
    """Return the git revision of the working directory; ``None`` outside of a repository."""
    return _git("rev-parse", "HEAD") or None


def code_diff() -> str:
    """Return the changes of the working directory since its git revision; empty outside of a repository."""
    return _git("diff", "HEAD")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value if each is not None]
    return value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
