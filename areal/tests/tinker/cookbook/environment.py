"""Environment of the published cookbook, which ``make test-cookbook`` makes."""

from __future__ import annotations

import os
import subprocess

from areal.tests.tinker.sdk.server import KEY, ROOT, ServerProcess

PYTHON = ROOT / ".venv-tinker-cookbook" / "bin" / "python"


def output_of(server: ServerProcess, *command: str) -> str:
    """Run a command in the environment of the cookbook, without the hub, and return what it prints."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}\n{server.text[-4000:]}"
    return done.stdout
