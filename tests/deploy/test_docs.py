"""The documentation is of this code: nothing is stale or left out, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
import typer.main
from deploy_tools import ROOT, run

from hisparse_service.cli.main import app
from hisparse_service.config import DEFAULTS
from hisparse_service.contract.errors import HiSparseError
from hisparse_service.contract.messages import REQUEST_TYPES

DOCS = ROOT / "docs"
GENERATE = [sys.executable, DOCS / "generate.py"]
OWN_PAGES = sorted(path for path in DOCS.glob("*.md"))
CODES = sorted(
    code for code, made in HiSparseError.registry.items() if made.__module__.endswith(".errors")
)


def test_generated_pages_are_up_to_date() -> None:
    done = run([*GENERATE, "--check"])
    assert done.returncode == 0, f"{done.stdout}: run `make docs`"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; strict: a link or an anchor that leads nowhere fails it."""
    target = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    # The theme's authors print an appeal at each build; it is no warning of this site.
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--config-file", ROOT / "mkdocs.yml",
         "--site-dir", target],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=100, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return target


def test_the_site_builds_and_every_link_leads_somewhere(site: Path) -> None:
    for page in ("index.html", "runbooks/HisparseDown/index.html", "reference/protocol/index.html"):
        assert (site / page).exists(), page


def test_a_link_that_leads_nowhere_would_have_been_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[x](index.md#nowhere)")
    text = (ROOT / "mkdocs.yml").read_text()
    text = re.sub(r"^(hooks|nav):\n(  .*\n)+", "", text, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(text)
    mkdocs = Path(sys.executable).with_name("mkdocs")
    done = run([mkdocs, "build", "--strict", "--config-file", tmp_path / "mkdocs.yml"])
    assert done.returncode != 0
    assert "nowhere" in done.stdout


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?([^\s\">]+)")
    for page in site.rglob("*.html"):
        for link in loads.findall(page.read_text()):
            assert not urlparse(link).netloc, f"{page.relative_to(site)} loads {link}"


@pytest.mark.parametrize("code", CODES)
def test_each_error_code_has_an_entry_with_a_remedy(code: str) -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    found = re.search(rf"^### {code}\n\n(.+?)(?=\n##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/troubleshooting.md has no entry for {code}"
    assert len(found[1].split("\n\n")) >= 2, "what it means, and what to do"


def test_no_entry_is_of_an_error_that_is_gone() -> None:
    entries = re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert sorted(entries) == CODES


def test_every_setting_says_what_it_means() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    for name in DEFAULTS:
        row = re.search(rf"^\| `{re.escape(name)}` \|.*\| (.*) \|$", text, re.MULTILINE)
        assert row, name
        assert len(row[1].split()) > 2, f"hisparse_service/config.py says nothing of {name}"


def test_every_request_is_in_the_protocol_reference() -> None:
    text = (DOCS / "reference" / "protocol.md").read_text()
    for tag, made in REQUEST_TYPES.items():
        assert f"### {made.__name__} (tag {tag})" in text


def commands() -> dict[str, set[str]]:
    """Sub-command, words joined, to its options."""
    found: dict[str, set[str]] = {}

    def walk(group: object, prefix: str) -> None:
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                walk(command, f"{prefix}{name} ")
            else:
                options = {
                    option
                    for each in command.params
                    for option in (*each.opts, *each.secondary_opts)
                }
                free = command.context_settings.get("ignore_unknown_options", False)
                found[prefix + name] = {"*"} if free else options | {"--help"}

    walk(typer.main.get_command(app), "")
    return found


@pytest.mark.parametrize(
    "page", [*OWN_PAGES, *sorted(DOCS.glob("runbooks/*.md"))], ids=lambda page: page.stem
)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    known = commands()
    text = page.read_text()
    code = [*re.findall(r"```\w*\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    for line in "\n".join(code).splitlines():
        found = re.search(r"(?:^|[\s/])hisparse-service ([a-z].*)", line.split("#")[0])
        if not found or "…" in line:  # the latter is a message's text
            continue
        words = shlex.split(re.split(r"[|&>\\]", found[1])[0])
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        assert name in known, f"{page.name}: hisparse-service {name}"
        for word in words:
            if word.startswith("--") and "*" not in known[name]:
                assert word.split("=")[0] in known[name], f"{page.name}: {name} {word}"


def test_the_reference_has_the_options_of_every_command() -> None:
    """Before, `demo`, which hands its words on, had none."""
    text = (DOCS / "reference" / "commands.md").read_text()
    for name, options in commands().items():
        section = re.search(rf"^## hisparse-service {name}$(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section, name
        for option in options - {"*", "--help"}:
            assert f"`{option}`" in section[1], f"{name} {option}"
    demo = text.split("## hisparse-service demo")[1].split("\n## ")[0]
    for option in ("--dtype", "--device", "--steps", "--no-cuda-graphs", "--json"):
        assert f"`{option}`" in demo, option
    assert "corrupt" not in demo


def test_files_that_the_pages_name_exist() -> None:
    for page in OWN_PAGES:
        for path in re.findall(r"\bdeploy/[\w@./-]+[\w/]", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
