"""`hisparse-service demo` as a user runs it: what it proves, and that it fails when it should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from helpers import SHM, has_ended, wait_until

import worker_client
from hisparse_service.cli.demo import INTERRUPTED
from hisparse_service.cli.exit_codes import CONFIG, FAILED, USAGE

# A run takes some 15 s of two free cores; several times that beside other tests.
pytestmark = pytest.mark.timeout(300)

SMALL = ("--requests", "2", "--steps", "14", "--pool-bytes", "16MiB")


def run_demo(*arguments, timeout_s=280):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    return subprocess.run(
        [sys.executable, "-m", "hisparse_service", "demo", *arguments],
        capture_output=True, text=True, timeout=timeout_s, env=environment, check=False,
    )  # fmt: skip


def test_the_demonstration_proves_its_point_on_its_own_daemon():
    """Tokens, logits, choices and host rows agree, and each mechanism really ran."""
    done = run_demo(*SMALL, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_good"]
    assert all(check["is_good"] for check in report["checks"])
    what = {check["what"] for check in report["checks"]}
    assert {"pages spilled", "rows missed", "hot rows evicted", "pages restored"} <= what
    first, second = report["phases"]
    for rank in first["ranks"] + second["ranks"]:
        assert rank["generated_tokens"] == 2 * 14
        assert rank["checked_rows"] > 0
        assert rank["wrong_rows"] == 0
    # The new workers computed next to nothing of the prompts.
    assert second["ranks"][0]["hit_tokens"] > 0.95 * second["prompt_tokens"]
    assert second["ranks"][0]["prefilled_tokens"] < 0.05 * second["prompt_tokens"]
    assert [rank["mirrored_pages"] for rank in (first["ranks"][1], second["ranks"][1])] == [0, 0]
    # One message a step, and what admits and ends a request.
    writer = first["ranks"][0]
    assert writer["control_messages"] <= writer["engine_steps"] + 3 * 2


def test_in_bfloat16_each_step_is_equal_bit_for_bit_to_one_with_all_rows_on_the_device():
    """Its sums agree in no two orders: the model's own cache proves less than in float32."""
    done = run_demo(*SMALL, "--dtype", "bfloat16", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    what = [check["what"] for check in report["checks"]]
    assert sum("equal bit for bit to all rows on the device" in each for each in what) == 4
    assert sum("logits, by the model's own cache" in each for each in what) == 4
    for rank in report["phases"][0]["ranks"] + report["phases"][1]["ranks"]:
        assert rank["twin_logits"] >= 2 * 14
        assert rank["twin_rows"] > rank["twin_choices"] > 0
        assert rank["twin_pages"] > 0  # the twin read from the ledger what came from the host


def test_a_damaged_host_row_is_found_and_fails_the_demonstration(make_daemon):
    """One bit of some rows in the pool, behind everyone's back; on somebody else's daemon."""
    daemon = make_daemon(pool_bytes="16MiB").wait_ready()
    done = run_demo(*SMALL, "--corrupt-host-rows", "--endpoint", str(daemon.runtime_dir))
    assert done.returncode == FAILED, done.stderr
    lines = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert any("host rows" in line and "rank 1" in line for line in lines), done.stdout
    # One bit in 320 bytes is a last digit of one value: the computation must notice it too.
    assert any("equal bit for" in line and "rank 1" in line for line in lines), done.stdout
    assert "layer" in done.stdout  # what differed first
    withdrawn = re.findall(r"the daemon withdrew ([0-9]+)", done.stdout)
    assert withdrawn, done.stdout
    with worker_client.connect(daemon.runtime_dir, client_name="test") as client:
        (namespace,) = client.status()["namespaces"]
        assert namespace["statistics"]["withdrawn"] >= sum(map(int, withdrawn)) > 0
        assert namespace["statistics"]["checks"]["damaged"] > 0
        assert namespace["withdrawn"] == 0
    assert "FAILED" in done.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_ended_demonstration_leaves_neither_processes_nor_memory(how):
    """The daemon is its own private one: nobody else would ever remove it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hisparse_service", "demo", *SMALL],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        for line in process.stderr:
            if "prompt tokens computed" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4  # supervisor, daemon, two ranks
        process.send_signal(how)
        process.stderr.read()
        assert process.wait(30) == (INTERRUPTED if how is signal.SIGINT else -how)
    wait_until(lambda: all(map(has_ended, family)), what="all processes have ended")
    assert not list(SHM.glob(f"hisparse-demo-{process.pid}-*"))


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--steps", "1"), CONFIG, "--steps 1: allowed are 2 to"),
        (("--device", "abacus"), CONFIG, "--device abacus"),
        (("--text", "/nonexistent/text"), CONFIG, "/nonexistent/text"),
        (("--requests", "32", "--text", __file__), CONFIG, "fewer --requests"),
        (("--pool-bytes", "much"), CONFIG, "much"),
        (("--cuda-graphs",), CONFIG, "--cuda-graphs: there are none on --device cpu"),
        (("--no-such-option",), USAGE, "no-such-option"),
    ],
    ids=["steps", "device", "no text", "short text", "size", "graphs", "option"],
)
def test_options_that_cannot_work_are_refused_at_once(arguments, status, says):
    done = run_demo(*arguments)
    assert done.returncode == status, done.stderr
    assert says in done.stderr.replace("\n", " ")


def test_a_pool_that_holds_no_request_is_refused_with_what_it_needs():
    done = run_demo(*SMALL[:4], "--pool-bytes", "2MiB")
    assert done.returncode == CONFIG, done.stderr
    assert "host blocks" in done.stderr
    assert "Give a larger --pool-bytes" in done.stderr


def test_cuda_without_a_cuda_device_is_a_clear_error():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run_demo(*SMALL, "--device", "cuda")
    assert done.returncode == CONFIG, done.stderr
    assert "torch sees no CUDA device" in done.stderr
