"""Stand-in for ``vllm serve``: takes its options, and serves as a current vLLM does.

``--shift-experts``, before the model, sends tokens to other experts than those of the routers, and ``--break`` ends it at once.
"""

from __future__ import annotations

import sys

from areal.tests.harness.servers.rollout_server import serve

if __name__ == "__main__":
    if "--break" in sys.argv:
        sys.exit("no memory for a cache")
    shifted = "--shift-experts" in sys.argv
    model, *options = [each for each in sys.argv[1:] if each != "--shift-experts"]
    returned = "--enable-return-routed-experts" in options
    port = int(options[options.index("--port") + 1])
    serve(model, port, modern=True, routed_experts=returned, shifted_experts=shifted)
