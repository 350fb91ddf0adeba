"""SkyRL's Tinker server with the backend: ``python -m areal.integrations.skyrl``, with the options of ``skyrl.tinker.api``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, add_model, config_to_argv
from skyrl.utils.log import get_uvicorn_log_config


def engine_command(_: Sequence[str], config: EngineConfig) -> list[str]:
    """Return the command of the engine process. It replaces that of SkyRL, which runs ``uv`` in a clone of SkyRL."""
    return [sys.executable, "-m", "areal.integrations.skyrl.engine", *config_to_argv(config)]


def serve() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m areal.integrations.skyrl", description=__doc__)
    add_model(parser, EngineConfig)
    parser.set_defaults(backend="areal")
    parser.add_argument("--host", default="0.0.0.0", help="address to bind to")
    parser.add_argument("--port", type=int, default=8000, help="port to bind to")
    options = vars(parser.parse_args())
    address = {name: options.pop(name) for name in ("host", "port")}
    # The server starts the engine process when it starts itself.
    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = EngineConfig.model_validate(options)
    uvicorn.run(api.app, **address, log_config=get_uvicorn_log_config())


if __name__ == "__main__":
    serve()
