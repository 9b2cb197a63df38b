"""Who may import whom, walked over every source file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "train", "infer", "conf", "data", "evaluation", "tools")
PACKAGES = {"laneformer": "laneformer", **{layer: f"laneformer.{layer}" for layer in LAYERS}}
SOURCES = [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]
# The bare install is the inference path; everything else needs an extra and is imported where it is used.
BARE = {"torch", "numpy", "safetensors", "tokenizers", "typer", "rich", "triton", "einops"}
# What each optional package may be imported by.
OPTIONAL = {
    "transformers": {
        "laneformer/hf.py",
        "laneformer/hf_export.py",
        "laneformer/hf_decode.py",
        "laneformer/dense.py",
        "evaluation/transformers_model.py",
    },
    "matplotlib": {"infer/figure.py", "infer/plan_figure.py"},
    "hydra": {"train/"},
    "omegaconf": {"train/", "tools/recipe.py"},
    "wandb": {"train/"},
    "datatrove": {"data/"},
    "datasets": {"data/"},
    "regex": {"data/"},
    "triton": {"kernels/"},
    "greenlet": {"kernels/simulate.py"},
}
# Modules that are of no use without their package, and say so when it is missing.
WHOLLY_OPTIONAL = {"laneformer/hf.py", "laneformer/hf_export.py", "laneformer/dense.py"}
INSIDE = {  # modules of laneformer/ that may import nothing of ours but what is listed
    "config": {"config_json", "presets"},
    "config_json": set(),
    "presets": set(),
    "schedule": {"config"},
    "norm": set(),
    "ops": {"norm"},
    "machines": {"config_json"},
    "cost": {"config", "schedule", "machines"},
    "phase_cost": {"cost", "machines"},
    "cache": {"config"},
    "lanes": {"ops", "schedule"},
    "view": {"cache", "config", "ops"},
    "modules": {"config", "lanes", "ops", "view"},
    "model": {"cache", "checkpoint", "config", "lanes", "modules", "schedule", "view"},
}


def name_of(path: Path) -> str:
    """The import name of a source file."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = [PACKAGES[relative.parts[0]], *relative.parts[1:]]
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute name, whether at the top level) of every import, type-checking blocks left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                walk(child, top)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            names = [base] if node.module else [f"{base}.{alias.name}" for alias in node.names]
            found.extend((name, top) for name in names)
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            walk(child, top and not inner)

    walk(tree, True)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_its_place_allows(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    own = name_of(path)
    for name, top in imports(path):
        package = name.split(".")[0]
        assert package not in LAYERS, f"{relative} imports the bare name {name}"
        if package == "laneformer":
            check_ours(relative, own, name)
        elif package in OPTIONAL:
            allowed = OPTIONAL[package]
            assert any(relative.startswith(place) for place in allowed), f"{relative} imports {name}"
            optional = relative in WHOLLY_OPTIONAL or relative.startswith(("train/", "kernels/", "data/"))
            assert optional or not top, f"{relative} imports {name} at its top"
        elif package not in sys.stdlib_module_names:
            assert package in BARE or relative.startswith("train/"), f"{relative} imports {name}, in no extra"


def check_ours(relative: str, own: str, name: str) -> None:
    """One import of our own code."""
    parts, target = own.split("."), name.split(".")
    layer = parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "laneformer"
    other = target[1] if len(target) > 1 and target[1] in PACKAGES else "laneformer"
    if layer == "laneformer":
        assert other == "laneformer", f"{relative} imports {name}, which lies above it"
        module = parts[-1]
        if module in INSIDE and len(target) > 1:
            assert target[1] in INSIDE[module], f"laneformer.{module} imports {name}"
    if layer == "kernels":
        allowed = {"laneformer.config", "laneformer.schedule", "laneformer.ops", "laneformer.decode_ops"}
        assert other == "kernels" or name in allowed, f"{relative} imports {name}"
    below = {"data": {"data"}, "evaluation": {"evaluation"}, "train": {"train", "data", "evaluation"},
             "infer": {"infer", "kernels", "evaluation"}}  # fmt: skip
    if layer in below:
        assert other in below[layer] | {"laneformer"}, f"{relative} imports {name}"


def test_collectives_live_only_where_partials_travel() -> None:
    allowed = ("infer/exchange.py", "infer/peer_memory.py", "infer/torchrun.py", "train/")
    for path in SOURCES:
        relative = str(path.relative_to(ROOT))
        if any(name.startswith("torch.distributed") for name, _ in imports(path)):
            assert relative.startswith(allowed), f"{relative} imports torch.distributed"


def test_the_inference_path_runs_without_any_extra() -> None:
    blocked = ["transformers", "matplotlib", "hydra", "omegaconf", "datasets", "datatrove", "wandb", "pytest"]
    code = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}: raise ImportError('blocked ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from laneformer.infer.cli import app\n"
        "import laneformer.infer.session, laneformer.infer.worker, laneformer.infer.compiled, laneformer.infer.bench\n"
        "import laneformer.infer.report, laneformer.infer.check, laneformer.infer.generate, laneformer.model\n"
        "app(['check', sys.argv[1]])\n"
    )
    folder = ROOT / "tests" / "golden" / "dtp-delay1"
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "PASS" in result.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, laneformer, laneformer.infer.ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_answers_one_question_in_under_300_lines(path: Path) -> None:
    limit = 400 if path.is_relative_to(ROOT / "kernels") else 300
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit
