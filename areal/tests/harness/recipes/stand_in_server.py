"""Stand-in for ``vllm serve``: takes its options, and serves as a current vLLM does."""

from __future__ import annotations

import sys

from areal.tests.harness.servers.rollout_server import serve

if __name__ == "__main__":
    model, options = sys.argv[1], sys.argv[2:]
    if "--break" in sys.argv:
        sys.exit("no memory for a cache")
    serve(model, int(options[options.index("--port") + 1]), modern=True)
