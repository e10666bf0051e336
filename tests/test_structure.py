"""The import rule of the code base, and what the wheel must hold."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOST_FILES = {
    "npglm.config",
    "npglm.checkpoint",
    "npglm.cache",
    "npglm.errors",
    "npglm.trace.probes",
}  # what reference may import


def imports(path: Path) -> set[str]:
    """Full dotted names that a file imports, also inside functions; `from a import b` counts as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def ours(names: set[str]) -> set[str]:
    return {n for n in names if n.split(".")[0] in ("npglm", "reference", "raw_kernels")}


def test_reference_imports_numpy_gguf_and_host_files_only():
    for path in files("reference"):
        names = imports(path)
        for name in ours(names):
            if name.startswith("npglm"):
                assert any(name == host or name.startswith(host + ".") for host in HOST_FILES), f"{path}: {name}"
            assert not name.startswith("raw_kernels"), f"{path}: {name}"
        third_party = {n.split(".")[0] for n in names} - {"npglm", "reference"} - sys.stdlib_module_names
        assert third_party <= {"numpy", "gguf"}, f"{path}: {third_party}"


def test_only_trace_imports_reference_inside_npglm():
    for path in files("npglm"):
        if path.parent.relative_to(ROOT / "npglm").parts[:1] != ("trace",):
            assert not any(n.split(".")[0] == "reference" for n in imports(path)), path


def test_cupy_is_imported_in_one_place():
    users = [
        p for folder in ("npglm", "reference") for p in files(folder) if any(n.split(".")[0] == "cupy" for n in imports(p))
    ]
    assert users in ([], [ROOT / "npglm/gpu/device.py"])


@pytest.mark.parametrize("module", ["npglm", "npglm.checkpoint", "npglm.generate", "npglm.trace.record"])
def test_importing_the_host_side_loads_no_heavy_package(module):
    code = (
        f"import sys, {module}; print([m for m in ('numba', 'cupy', 'torch', 'reference', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_every_package_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("npglm", "reference", "raw_kernels")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert listed == there | {"npglm.data"}  # holds no code


def test_every_public_op_of_the_reference_is_bound_and_documented():
    from reference import ops

    verbs = {v.__name__ for v in ops.VERBS + ops.PARTS + ops.EXACT}
    for path in files("reference/ops"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and path.name != "__init__.py" and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"
                assert node.name in verbs | {"round_activations"}, f"{path}: {node.name} is not in VERBS"
