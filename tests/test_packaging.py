"""The wheel: what is in it, and that both commands run from it in a fresh environment, from another folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a clean copy of the sources, without network."""
    out = tmp_path_factory.mktemp("wheel")
    copy = out / "source"
    subprocess.run(["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={copy}/"], check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an empty environment with the wheel in it; dependencies are lent by path, not reinstalled."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=300)
    (site,) = (home / "lib").glob("python*/site-packages")
    # A path line brings the packages but not the .pth files there, so not the editable install of this project.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin"


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A finished command."""
    return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_wheel_holds_one_import_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"laneformer", next(top for top in tops if top.endswith(".dist-info"))}
    for member in (
        "laneformer/model.py", "laneformer/infer/cli.py", "laneformer/train/cli.py", "laneformer/kernels/__init__.py",
        "laneformer/conf/config.yaml", "laneformer/conf/recipe/2b.yaml", "laneformer/tools/cli.py",
        "laneformer/data/shards.py", "laneformer/evaluation/problems/mbpp.jsonl.gz",
    ):  # fmt: skip
        assert member in names


def test_both_commands_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import laneformer; print(laneformer.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(installed.parent))
    for command in ("infer", "train", "laneformer"):
        result = run(installed / command, "--help", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    result = run(installed / "infer", "check", ROOT / "tests/golden/dtp-delay1", "--ranks", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "PASS" in result.stdout


def test_every_direct_dependency_is_pinned_and_used() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    direct = {line.split(">")[0].split("[")[0].lower().replace("-", "_") for group in groups for line in group}
    direct -= {"laneformer"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("-", "_") for line in lines if "==" in line}
    assert direct <= pinned
    text = "\n".join(
        path.read_text(encoding="utf-8", errors="ignore")
        for pattern in ("*/*.py", "tests/**/*.py", "Makefile", ".pre-commit-config.yaml", "experiments/**/*.py")
        for path in ROOT.glob(pattern)
        if ".venv" not in path.parts and path != Path(__file__)
    )
    imported_as = {"hydra_core": "hydra", "pre_commit": "repos:", "pytest_xdist": "-n ", "setuptools": "setuptools",
                   "hydra_submitit_launcher": "hydra/launcher=submitit_local", "orjson": "JsonlReader"}  # fmt: skip
    unused = [name for name in direct if imported_as.get(name, name) not in text]
    assert not unused
