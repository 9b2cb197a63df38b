"""The tests of compiled code with other versions of triton, each installed in a folder of its own.

    python other_versions.py FOLDER [VERSION...]        # 3.6.0 and 3.9.0 unless given; about 700 MB each

Exit code 3: a version could not be installed. 1: a test failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.6.0", "3.9.0")
CANNOT_INSTALL = 3


def installed(folder: Path, version: str) -> Path | None:
    """The folder that holds this version of triton, installed if need be; None where that fails."""
    target = folder / f"triton-{version}"
    if not (target / "triton" / "__init__.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        if subprocess.run([*command, f"triton=={version}"], check=False).returncode != 0:
            return None
    return target


def main(folder: Path, versions: tuple[str, ...]) -> int:
    """Runs the fast tests of compiled code once for each version."""
    for version in versions:
        target = installed(folder, version)
        if target is None:
            return CANNOT_INSTALL
        environment = os.environ | {"PYTHONPATH": str(target)}
        environment.pop("TRITON_INTERPRET", None)
        tests = [str(ROOT / "tests" / "kernels" / f"test_{name}.py") for name in ("compiled_code", "decode_code")]
        print(f"triton {version}", flush=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
            return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: other_versions.py FOLDER [VERSION...]")
    sys.exit(main(Path(sys.argv[1]), tuple(sys.argv[2:]) or VERSIONS))
