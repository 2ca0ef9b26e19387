"""The image, as far as it can be checked without an engine that builds it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from deploy_tools import DEPLOY, ROOT, find_tool, run

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
PREFIX = "/opt/hisparse-service"


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments), continuation lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (words[0], words[1])
        for words in (line.split(None, 1) for line in text.splitlines() if line)
    ]


def values(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def test_hadolint_finds_nothing() -> None:
    done = run([find_tool("hadolint"), DOCKERFILE])
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_as_a_numbered_user_without_a_shell_between() -> None:
    assert values("USER") == ["10001:10001"]
    assert values("ENTRYPOINT") == ['["hisparse-service"]']
    assert values("CMD") == ['["serve"]']


def test_the_build_context_has_what_is_copied_and_no_more() -> None:
    kept = {
        line[1:]
        for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        path
        for arguments in values("COPY") if "--from" not in arguments
        for path in arguments.split()[:-1]
    }  # fmt: skip
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_image_installs_serves_and_holds_no_torch(tmp_path: Path) -> None:
    """The RUN step that makes the environment, in a clean one, from the image's own context."""
    context, target = tmp_path / "src", tmp_path / "venv"
    context.mkdir()
    for arguments in values("COPY"):
        if "--from" in arguments:
            continue
        for path in arguments.split()[:-1]:
            source = ROOT / path
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, context / path, ignore=ignored)
            else:
                shutil.copy(source, context / path)
    (step,) = (each for each in values("RUN") if "pip install" in each)
    commands = [shlex.split(part) for part in step.split(" && ")]
    assert commands[0] == ["python", "-m", "venv", PREFIX]
    venv.create(target, with_pip=True)
    for command in commands[1:]:
        rooted = [word.replace(PREFIX, str(target)) for word in command]
        done = subprocess.run(
            rooted, cwd=context, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:]
    installed = {path.name.split("-")[0].lower() for path in target.rglob("*.dist-info")}
    assert "hisparse_service" in installed
    assert not installed & {"torch", "cuda_core", "transformers", "pytest", "pip"}
    command = target / "bin" / "hisparse-service"
    assert run([command, "--version"]).stdout.strip() == "0.1.0"
    assert run([command, "config", "check"]).returncode == 0
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert size < 250 * 2**20, f"{size / 2**20:.0f} MiB"
