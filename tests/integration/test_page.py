"""The page in a real browser: it draws itself from a living daemon, and says when that is gone.

With HISPARSE_PICTURES=docs/images in the environment the pictures of the documentation are made
anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import DaemonProcess, wait_until
from rich.console import Console

from hisparse_service.cli.top import render
from tests.integration.test_http import get, port_of

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=8000",
)  # fmt: skip
LOAD = str(Path(__file__).parent.parent / "load.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium (Debian package chromium)"),
    pytest.mark.timeout(300),
]
MakeDaemon = Callable[..., DaemonProcess]


def browse(url: str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1240", *flags, url],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran


def complaints(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page's script or its policy brought to the console."""
    return [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def busy(make_daemon: MakeDaemon, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon under a made-up load."""
    daemon = make_daemon(
        pool_bytes="256MiB", instance=f"node-7-{os.getpid()}", http__listen="127.0.0.1:0"
    ).wait_ready()
    seconds = "150" if "HISPARSE_PICTURES" in os.environ else "60"
    load = subprocess.Popen(
        [sys.executable, LOAD, str(daemon.runtime_dir), seconds],
        env=os.environ | {"PYTHONPATH": str(Path(LOAD).parent)},
    )
    try:
        port = port_of(daemon)

        def is_drawn() -> bool:
            found = json.loads(get(port, "/overview.json")[1])
            return bool(found.get("occupancy")) and found["rates"]["evictions"] > 0

        wait_until(is_drawn, what="evictions under load")
        if "HISPARSE_PICTURES" in os.environ:
            end_s = time.monotonic() + 75
            wait_until(lambda: get(port, "/overview.json") and time.monotonic() > end_s, 90)
        yield daemon
    finally:
        load.kill()
        load.wait()


def test_the_page_shows_a_living_daemon(busy: DaemonProcess, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{port_of(busy)}/"
    ran = browse(url, tmp_path / "profile", "--dump-dom")
    assert complaints(ran) == []
    dom = ran.stdout
    assert '<body data-state="live">' in dom
    assert re.search(r'<span id="phase" class="badge ready">ready</span>', dom)
    assert busy.instance in dom
    for text in ("Prefix hits", "Blocks held", "being read", "glm-5.2-fp8 tp4", "session_opened"):
        assert text in dom
    assert dom.count("<canvas") == 2
    sessions = re.search(r'<table id="sessions">.*?</table>', dom, re.DOTALL)
    assert sessions is not None
    assert {"glm-a", "glm-b", "deepseek"} <= set(re.findall(r">([a-z-]+)<", sessions.group()))
    assert re.search(r"<h2>Evictions</h2><div class=\"number\">[1-9]", dom)


def test_pictures_differ_by_day_and_night(busy: DaemonProcess, tmp_path: Path) -> None:
    url, where = f"http://127.0.0.1:{port_of(busy)}/", tmp_path
    if "HISPARSE_PICTURES" in os.environ:
        where = Path(os.environ["HISPARSE_PICTURES"]).absolute()
    light, dark = where / "page-light.png", where / "page-dark.png"
    browse(url, tmp_path / "a", f"--screenshot={light}")
    browse(url, tmp_path / "b", f"--screenshot={dark}", "--force-dark-mode")
    assert min(light.stat().st_size, dark.stat().st_size) > 50_000
    assert light.read_bytes() != dark.read_bytes()
    ran = subprocess.run(
        [sys.executable, "-m", "hisparse_service", "top", "--json", "--runtime-dir",
         str(busy.runtime_dir)], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    with (tmp_path / "void").open("w") as void:
        console = Console(record=True, width=120, force_terminal=True, file=void)
        console.print(render(json.loads(ran.stdout), width=120))
        console.save_svg(str(where / "top.svg"), title="hisparse-service top")


def test_names_that_clients_choose_are_text_and_nothing_else(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon(http__listen="127.0.0.1:0").wait_ready()
    port = port_of(daemon)
    with daemon.client(group="<img src=x onerror=document.title='owned'>") as client:
        client.open(16)
        wait_until(lambda: json.loads(get(port, "/overview.json")[1]).get("session_rows"))
        ran = browse(f"http://127.0.0.1:{port}/", tmp_path / "profile", "--dump-dom")
    assert "&lt;img src=x" in ran.stdout
    assert "<img" not in ran.stdout
    assert "<title>owned" not in ran.stdout


def test_a_browser_that_was_given_the_token_shows_the_page(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    daemon = make_daemon(http__listen="127.0.0.1:0", http__token_file=str(token)).wait_ready()
    port = port_of(daemon)
    # The browser's clock runs ahead of the daemon's, which draws when somebody has looked.
    bearer = {"Authorization": "Bearer secret"}
    wait_until(lambda: json.loads(get(port, "/overview.json", **bearer)[1]).get("at"))
    # As a browser does after it has asked for the password.
    ran = browse(f"http://any:secret@127.0.0.1:{port}/", tmp_path / "profile", "--dump-dom")
    assert complaints(ran) == []
    assert '<body data-state="live">' in ran.stdout
