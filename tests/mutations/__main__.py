"""Break each guard on purpose and see its test fail: ``python -m tests.mutations [WORD ...]``.

Works on a copy of the checkout. A guard whose test still passes when it is gone is a guard that nothing proves; the
exit code is their number. WORDs select guards by a part of their name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS, Mutation

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("scriba", "tests", "example_project", "pyproject.toml", "manage.py")


def main(words: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.guard for word in words)]
    survivors = 0
    for mutation in chosen:
        with tempfile.TemporaryDirectory(prefix="scriba-mutation-") as folder:
            caught, detail = _try(mutation, Path(folder))
        survivors += not caught
        print(f"{'caught  ' if caught else 'SURVIVED'}  {mutation.guard}: {detail}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} removed guards were noticed")
    return survivors


def _try(mutation: Mutation, folder: Path) -> tuple[bool, str]:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    broken = folder / mutation.path
    text = broken.read_text()
    if text.count(mutation.old) != 1:
        return False, f"the patch does not apply to {mutation.path}"
    broken.write_text(text.replace(mutation.old, mutation.new))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        mutation.test,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return done.returncode == 1, summary


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
