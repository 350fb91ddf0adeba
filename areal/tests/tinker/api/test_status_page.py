"""The status page in a real browser."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from areal.tests.tinker.api.stand_in import HOSTILE, StandInService
from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import ApiSettings

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture
def url() -> Iterator[str]:
    """Serve the application on a free port, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(StandInService(), ApiSettings()), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(10)


@pytest.mark.skipif(BROWSER is None, reason="no headless browser is installed")
def test_the_page_shows_the_state_and_escapes_names(url: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000"]
    done = subprocess.run([BROWSER, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    page = done.stdout
    assert '<span id="health" class="good">healthy</span>' in page
    assert "active sessions: 1" in page
    # Three points of the curve by token, of which each request has nine, between labelled axes, and the last loss.
    assert "44.0,8.0 139.0,49.5 234.0,84.0" in page
    for label in (">0.4444<", ">0.1389<", ">loss per token<", ">request (seq_id)<", "3 passes, last 0.1389"):
        assert label in page
    assert "<td>first run</td>" in page
    assert "<td>ann</td>" in page
    # A rate needs two looks at the counters.
    assert "<td>training</td><td>900</td><td></td>" in page
    assert "<td>memory, free</td><td>5120</td>" in page
    assert "<td>2</td><td>1</td><td>4</td>" in page  # the queue
    assert "2001" in page
    # Names of runs are text: they add no element and run no script.
    assert page.count(HOSTILE.replace("<", "&lt;").replace(">", "&gt;")) >= 3
    assert "<img" not in page
    assert "<title>areal server</title>" in page
