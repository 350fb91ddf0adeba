"""A process with a reaper, a program of its episode, and a forked child that outlives both, as the workers of a pool do.

Prints the ids of the child and of the program. A test kills it, or writes a line, at which it leaves the reaper.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time

from areal.integrations.verifiers.reaper import MARK, Reaper


async def main(mark: str) -> None:
    async with Reaper(mark):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        child.start()
        program = await asyncio.create_subprocess_exec("sleep", "3600", env={**os.environ, MARK: mark})
        print(child.pid, program.pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    # Without the end of multiprocessing, which waits for the child.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
