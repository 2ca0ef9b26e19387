"""The quick way into `serve`: the same options as typer's, and nothing heavy before the pages."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import typer

from hisparse_service.cli import serve, serve_start
from hisparse_service.cli.main import app
from hisparse_service.server.loop import STOP_SIGNALS as LOOP_SIGNALS
from hisparse_service.start import STOP_SIGNALS

SAMPLES = {
    "--config": "file.toml", "--instance": "a", "--runtime-dir": "/run/x", "--pool-bytes": "8GiB",
    "--log-format": "json", "--log-level": "debug", "--set": "pool.numa=none", "--ready-fd": "7",
    "--standby": "2.5",
}  # fmt: skip


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    """What typer makes of a command line."""
    taken = []
    monkeypatch.setattr(serve, "run", taken.append)

    def parse(*words: str) -> serve_start.ServeOptions:
        typer.main.get_command(app)(["serve", *words], standalone_mode=False)
        return taken.pop()

    return parse


def test_every_option_of_serve_is_known_to_the_quick_reader() -> None:
    command = typer.main.get_command(app).commands["serve"]
    names = {name for each in command.params for name in each.opts} - {"--help"}
    assert names == set(SAMPLES)
    assert set(inspect.signature(serve.serve).parameters) == {each.name for each in command.params}


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_both_readers_understand_the_same(typed, joined: bool) -> None:
    words: list[str] = []
    for name, value in SAMPLES.items():
        words += [f"{name}={value}"] if joined else [name, value]
        quick = serve_start.quick_options(words)
        assert quick is not None
        assert quick == typed(*words)


def test_a_named_option_wins_over_set_wherever_it_stands(typed) -> None:
    words = ["--instance", "named", "--set", "instance=assigned", "--set", "a.b = c = d"]
    quick = serve_start.quick_options(words)
    assert quick is not None
    assert quick.flags == {"instance": "named", "a.b": "c = d"}
    assert quick == typed(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["--pool", "1"], ["--instance"], ["--instance", "--config"], ["extra"],
        ["--ready-fd", "-2"], ["--ready-fd", "x"], ["--standby", "-1"], ["--standby", "nan"],
        ["--set", "no-separator"], ["-x"],
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_typer(words: list[str]) -> None:
    assert serve_start.quick_options(words) is None


def test_nothing_heavy_is_imported_before_pages_are_reserved() -> None:
    """Each would be paid for by every start: 0.05 to 0.1 s, while the cores have nothing to do."""
    program = (
        "import sys\n"
        "import hisparse_service.cli.entry, hisparse_service.start\n"
        "import hisparse_service.testing.faults\n"
        "heavy = {'numpy', 'zmq', 'typer', 'structlog', 'rich', 'hisparse_service.daemon'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_signals_that_wait_are_those_that_the_loop_takes() -> None:
    assert STOP_SIGNALS == LOOP_SIGNALS
