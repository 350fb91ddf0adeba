"""Creates an environment for each peer library, and reports those that cannot be created.

    python -m benchmarks.peers.install [NAME ...]

An environment uses this one's packages if the peer accepts their versions, and installs others: all rows run on the same
torch and differ only in the library. A peer that cannot be installed does not stop the others.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HOME = Path("runs/peers")
"""Directory of the environments, under the working directory."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "trl": ("trl",),
    "verl": ("verl",),
    "torchtitan": ("torchtitan", "triton"),  # torchtitan imports it, and a CPU build of torch does not install it
}
"""Packages to install for each peer."""

SECONDS = 1200
"""Time limit of an installation, in seconds."""


def interpreter(peer: str) -> Path:
    """Return the path of the Python in a peer's environment, even if it does not exist."""
    return (HOME / peer / "bin" / "python").absolute()


def install(peer: str) -> str | None:
    """Create the environment of ``peer``, unless it exists. Returns the error message, or ``None``."""
    if peer not in PACKAGES:
        raise ValueError(f"peer = {peer!r}: choose among {', '.join(PACKAGES)}")
    folder = HOME / peer
    done = folder / "installed"
    if done.exists():
        return None
    venv.create(folder, with_pip=True, clear=True)
    python = interpreter(peer)
    own = next((folder / "lib").glob("python*/site-packages"))
    # A line of a .pth file is a directory that Python searches after the environment's packages.
    (own / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[peer]]
    log = HOME / f"{peer}.log"
    try:
        with log.open("w") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return f"pip took more than {SECONDS} s; see {log}"
    if code:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        return f"pip ended with {code}: {lines[-1] if lines else 'without a word'}; see {log}"
    done.touch()
    return None


def main() -> None:
    """Install the named peers, or all. Exits with 0 even if some cannot be installed."""
    HOME.mkdir(parents=True, exist_ok=True)
    for peer in sys.argv[1:] or PACKAGES:
        wrong = install(peer)
        print(f"{peer}: {'installed' if wrong is None else 'NOT installed: ' + wrong}", flush=True)


if __name__ == "__main__":
    main()
