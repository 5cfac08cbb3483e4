"""The examples of "Deploy" are run, or compared with what they stand for: commands, options, ports, paths, times."""

from __future__ import annotations

import argparse
import configparser
import functools
import getpass
import itertools
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, get_commands, load_command_class

from scriba.conf import Settings
from tests.acceptance.conftest import Shop
from tests.support.processes import REPOSITORY
from tests.support.waiting import wait_until

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

PAGE = REPOSITORY / "docs/howto/deploy.md"
SYSTEMD = shutil.which("systemd-analyze")
#: Every page but the tutorials, whose commands are run by their own tests.
PAGES = sorted(
    path for path in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")) if "tutorial" not in path.parts
)


def block(kind: str) -> str:
    """Return the page's only code block of a kind."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(block("ini"))
    return parsed


def dockerfile() -> dict[str, list[str]]:
    """Return the arguments of each instruction, in the order of its lines."""
    found: dict[str, list[str]] = {}
    for line in block("dockerfile").splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
    return found


def container() -> dict[str, Any]:
    (found,) = yaml.safe_load(block("yaml"))["spec"]["template"]["spec"]["containers"]
    return dict(found)


#: What each example starts, as a list of words.
STARTS = {
    "systemd": lambda: shlex.split(unit()["Service"]["ExecStart"]),
    "docker": lambda: json.loads(dockerfile()["CMD"][-1]),
    "kubernetes": lambda: container()["args"],
}


def options(words: list[str]) -> argparse.Namespace:
    """Parse ``python manage.py command …`` as the command itself would. Raises CommandError for what it does not know."""
    at = words.index("manage.py")
    command = words[at + 1]
    parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
    parser.called_from_command_line = False  # type: ignore[attr-defined]
    return parser.parse_args(words[at + 2 :])


# --- all examples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARTS)
def test_what_an_example_starts_is_a_command_that_takes_its_options(name: str) -> None:
    """An option that was renamed would be found by the first restart in production."""
    words = STARTS[name]()

    assert Path(words[0]).name == "python"
    assert words[1:3] == ["manage.py", "run_projections"]
    assert options(words).log_format == "json"


@pytest.mark.case("D4", "D5")
def test_every_supervisor_waits_longer_than_a_drain_takes() -> None:
    """Killed in the middle of a drain, nothing is lost, but the successor has to wait for the lease to run out."""
    drain_s = Settings().drain_timeout_s
    (said,) = re.findall(r"--stop-timeout (\d+)", PAGE.read_text())
    grace = yaml.safe_load(block("yaml"))["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]

    assert min(float(unit()["Service"]["TimeoutStopSec"]), float(said), float(grace)) > drain_s
    assert f"drain_timeout_s ({drain_s:g})" in block("ini")


@pytest.mark.case("D4")
@pytest.mark.parametrize("name", STARTS)
def test_what_an_example_starts_runs_is_well_and_drains(name: str, shop: Shop, started: Started) -> None:
    """In a process of its own on a database of its own: probes and metrics answer where the example says, SIGTERM ends it."""
    process, ports = started(STARTS[name]())

    wait_until(lambda: all(answer(*place) == 200 for place in places(name, ports)), timeout=60, what="good health")
    shop.execute(
        "INSERT INTO shop_storedevent (event_id, stream_id, type, data, metadata, occurred_at)"
        " VALUES (gen_random_uuid(), 'o-1', 'StockCounted', %s, '{}', now())",
        json.dumps({"sku": "a", "quantity": 1}),
    )
    shop.wait_settled("orders", 1)
    process.send_signal(getattr(signal, dockerfile()["STOPSIGNAL"][0]) if name == "docker" else signal.SIGTERM)

    assert process.wait(45) == 0


class Started:
    """Starts what an example starts, with free ports instead of those that it names."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._running: list[Any] = []

    def __call__(self, words: list[str]) -> tuple[subprocess.Popen[str], dict[str, int]]:
        ports = {word: free_port() for before, word in itertools.pairwise(words) if before.endswith("-port")}
        arguments = [str(ports.get(word, word)) for word in words[2:]]
        context = self._shop.managed(*arguments)
        process = context.__enter__()
        self._running.append(context)
        return process, ports

    def close(self) -> None:
        for context in self._running:
            context.__exit__(None, None, None)


@pytest.fixture
def started(shop: Shop) -> Iterator[Started]:
    made = Started(shop)
    yield made
    made.close()


def places(name: str, ports: dict[str, int]) -> list[tuple[int, str]]:
    """Return where an example looks, with the port that is there in this test."""
    if name == "kubernetes":
        named = {port["name"]: str(port["containerPort"]) for port in container()["ports"]}
        probes = [container()[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")]
        return [(ports[named[probe["port"]]], probe["path"]) for probe in probes] + [
            (ports[named["metrics"]], "/metrics")
        ]
    if name == "docker":
        (port, path) = re.findall(r"http://localhost:(\d+)(/\w+)", dockerfile()["HEALTHCHECK"][0])[0]
        return [(ports[port], path)]
    return []


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def answer(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


# --- systemd -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """No unknown setting, no value that systemd would ignore; only what lies on the example's machine is put here."""
    (tmp_path / "env").touch()
    text = block("ini")
    for there, here in {
        "/srv/shop/venv/bin/python": sys.executable, "/srv/shop": str(tmp_path), "/etc/shop.env": str(tmp_path / "env"),
        "User=shop": f"User={getpass.getuser()}",
    }.items():  # fmt: skip
        assert there in text
        text = text.replace(there, here)
    path = tmp_path / "projections.service"
    path.write_text(text)

    done = verified(path)
    path.write_text(text.replace("RestartSec=2", "RestartSecs=2"))
    wrong = verified(path)

    assert (done.returncode, done.stderr) == (0, "")
    assert "RestartSecs" in wrong.stderr, "else this test could not fail"


def verified(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SYSTEMD), "verify", "--man=no", "--recursive-errors=no", str(path)],
        text=True,
        capture_output=True,
        check=False,
    )


# --- Docker and Kubernetes ---------------------------------------------------------------------------------------


def test_the_image_exposes_what_its_command_serves() -> None:
    """Ports are named three times in a Dockerfile; here they are compared."""
    given = options(STARTS["docker"]())

    assert {int(port) for port in dockerfile()["EXPOSE"][0].split()} == {given.health_port, given.metrics_port}


def test_the_images_health_check_is_a_program_that_fails_when_it_should() -> None:
    """Exit code 0 for an answer, another one for a refusal: what Docker looks at."""
    port = free_port()
    words = json.loads(dockerfile()["HEALTHCHECK"][0].removeprefix("CMD "))
    here = [sys.executable, *(word.replace("8081", str(port)) for word in words[1:])]

    assert subprocess.run(here, capture_output=True, check=False, timeout=30).returncode != 0


def test_the_deployment_fits_together() -> None:
    """Pods are selected by the labels that they get; probes and ports are those of the command line."""
    deployment = yaml.safe_load(block("yaml"))
    spec, given = deployment["spec"], options(container()["args"])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}

    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert ports == {"health": given.health_port, "metrics": given.metrics_port}
    assert container()["livenessProbe"]["httpGet"] == {"path": "/live", "port": "health"}
    assert container()["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "health"}
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0, "the standby is there before the owner leaves"


# --- every page --------------------------------------------------------------------------------------------------


def command_lines(path: Path) -> list[str]:
    """Return each command of ours or of Django that a page shows, in a block or in a sentence, without the remark behind it."""
    text = path.read_text()
    fences = re.findall(r"^ *```[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    typed = [line.strip().removeprefix("$ ") for fence in fences for line in fence.splitlines()]
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:python )?(?:manage\.py )?(?:run_projections|scriba_\w+) [^`]+)`", prose)
    lines = [line for line in typed if re.match(r"(python )?manage\.py \w", line)] + [
        line if "manage.py" in line else f"manage.py {line}" for line in map(" ".join, map(str.split, named))
    ]
    return [re.split(r"  +|  #", line)[0] for line in lines if not re.search(r"[…\[]|\b[A-Z]{2,}\b|<", line)]


@functools.cache
def known_commands() -> set[str]:
    return {name for name, app in get_commands().items() if app == "scriba" or app.startswith("django.")}


def test_pages_show_commands() -> None:
    """The next test would be content with pages on which it finds none."""
    assert sum(len(command_lines(path)) for path in PAGES) > 20


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_command_that_a_page_shows_can_be_typed(path: Path) -> None:
    """Names and options exist. A sentence may name an option without its value; placeholders in capitals are left out."""
    wrong = {}
    for line in command_lines(path):
        words = shlex.split(line)
        if words[words.index("manage.py") + 1] in known_commands():
            try:
                options(words)
            except CommandError as error:
                if not re.search("expected one argument|arguments are required", str(error)):
                    wrong[line] = str(error)

    assert wrong == {}
