"""Makes an environment for each peer, and says plainly which could not be made.

    python -m benchmarks.peers.install [NAME ...]

An environment borrows this one's packages wherever a peer takes their versions, and has its own where it does not: all rows then run on
the same torch, and differ in what is around it. A peer that cannot be installed does not stop the others.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HOME = Path("runs/peers")
"""Where the environments are, under the working directory."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "trl": ("trl",),
    "verl": ("verl",),
    "torchtitan": ("torchtitan", "triton"),  # which it imports, and a torch for the CPU does not bring
}
"""What pip installs for each peer."""

SECONDS = 1200
"""Longest installation."""


def interpreter(peer: str) -> Path:
    """The Python of a peer's environment, whether it is there or not."""
    return (HOME / peer / "bin" / "python").absolute()


def install(peer: str) -> str | None:
    """Make the environment of ``peer``, unless it is there; returns what went wrong, or ``None``."""
    if peer not in PACKAGES:
        raise ValueError(f"peer = {peer!r}: choose among {', '.join(PACKAGES)}")
    folder = HOME / peer
    done = folder / "installed"
    if done.exists():
        return None
    venv.create(folder, with_pip=True, clear=True)
    python = interpreter(peer)
    own = next((folder / "lib").glob("python*/site-packages"))
    # A line of a .pth file is a folder to search after the environment's own.
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
    """Install the peers that are named, or all; ends with 0 whether they could be or not."""
    HOME.mkdir(parents=True, exist_ok=True)
    for peer in sys.argv[1:] or PACKAGES:
        wrong = install(peer)
        print(f"{peer}: {'installed' if wrong is None else 'NOT installed: ' + wrong}", flush=True)


if __name__ == "__main__":
    main()
