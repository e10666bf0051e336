"""The import rule of the code base, and what the wheel must hold."""

import ast
import inspect
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


def test_every_op_has_its_twins_and_a_case():
    """A verb of the reference is a verb of every production op set, with the same leading arguments, and tests/ops has a case for it."""
    import npglm.cpu.ops
    import npglm.gpu.ops
    from reference import ops

    cases = "".join(path.read_text() for path in files("tests/ops"))
    for verb in ops.VERBS + ops.EXACT:
        mine = [p for p in inspect.signature(verb).parameters if p != "num"]
        for production in (npglm.gpu.ops, npglm.cpu.ops):
            twin = {getattr(v, "__name__", v): v for v in production.VERBS}.get(verb.__name__)
            assert twin is not None, f"{production.__name__} has no {verb.__name__}"
            if callable(twin):
                theirs = [p for p in inspect.signature(twin).parameters if p not in ("ops", "self")]
                assert theirs[: len(mine)] == mine, f"{production.__name__}: {verb.__name__}{theirs}, expected {mine}"
        assert f'"{verb.__name__}"' in cases, f"tests/ops has no case for {verb.__name__}"
