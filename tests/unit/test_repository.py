"""Rules of the repository that no linter knows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hfpar.config.audit_schema import AuditConfig
from hfpar.config.schema import SFTConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "hfpar").rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 65
MAY_READ_THE_ENVIRONMENT = {"hfpar/accelerator.py", "hfpar/cli.py", "hfpar/demo.py", "hfpar/launch.py"}
MODULE_OF = {"pyyaml": "yaml", "flash-attn": "flash_attn", "math-verify": "math_verify"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def readers_of_the_config(names: tuple[str, ...]) -> list[Path]:
    outside = [path for path in PACKAGE if path.parent.name != "config"]
    paths = [*outside, *sorted((ROOT / "sft").glob("*.py"))]
    return [path for path in paths if any(name in path.read_text() for name in names)]


def read_settings(paths: list[Path]) -> set[str]:
    """Names in `config.NAME` and `self.config.NAME`, where they are read."""
    found = set()
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", None)
                if name == "config":
                    found.add(node.attr)
    return found


@pytest.fixture(scope="module")
def settings_read() -> set[str]:
    return read_settings(readers_of_the_config(("SFTConfig", "parse_sft_config")))


@pytest.fixture(scope="module")
def audit_settings_read() -> set[str]:
    return read_settings(readers_of_the_config(("AuditConfig",)))


@pytest.mark.parametrize("name", list(vars(SFTConfig())))
def test_every_setting_is_read(settings_read, name):
    assert name in settings_read, f"nothing outside hfpar/config reads config.{name}"


@pytest.mark.parametrize("name", list(vars(AuditConfig())))
def test_every_setting_of_an_audit_is_read(audit_settings_read, name):
    assert name in audit_settings_read, f"nothing outside hfpar/config reads config.{name}"


@pytest.mark.parametrize("folder", ["sft", "eval", "accelerate_configs", "tests", "benchmarks"])
def test_folders_that_are_not_packages_have_no_init(folder):
    assert not list((ROOT / folder).rglob("__init__.py"))


@pytest.mark.parametrize("folder", ["sft", "eval"])
def test_a_script_folder_has_one_module_at_most(folder):
    # The folder is first on sys.path when its script runs: sft/datasets.py would replace the library.
    assert len(list((ROOT / folder).rglob("*.py"))) <= 1


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_files_and_functions_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def environment_reads(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv"))
    ]


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_only_few_modules_touch_the_environment(path):
    if relative(path) in MAY_READ_THE_ENVIRONMENT or "verify" in path.parts:
        return
    assert not environment_reads(path.read_text())


def test_environment_reads_are_found():
    assert environment_reads("import os\nos.environ['A']\nos.getenv('B')\n") == [2, 3]
    assert environment_reads("from os import environ\n") == [1]


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"hfpar"}


def declared_modules(*requirements: str) -> set[str]:
    names = [re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements]
    return {MODULE_OF.get(name, name) for name in names}


def test_every_import_is_a_declared_dependency_and_every_dependency_is_imported():
    project = PYPROJECT["project"]
    required = declared_modules(*project["dependencies"])
    optional = declared_modules(
        *(item for extra in project["optional-dependencies"].values() for item in extra)
    )
    imported = set().union(*(imported_modules(path) for path in PACKAGE))
    assert imported <= required | optional
    assert required <= imported


def test_every_pinned_version_is_in_the_declared_range():
    from packaging.requirements import Requirement

    project = PYPROJECT["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    requirements += [
        Requirement(text) for extra in project["optional-dependencies"].values() for text in extra
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        name.lower().replace("_", "-"): version
        for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }
    for requirement in requirements:
        name = requirement.name.lower().replace("_", "-")
        if name == "flash-attn":  # needs a GPU's compiler to install, so that it isn't pinned
            continue
        assert name in pins
        assert requirement.specifier.contains(pins[name]), (
            f"{name}=={pins[name]} is not {requirement.specifier}"
        )


def test_packages_are_found_by_name():
    find = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find == {"include": ["hfpar*"]}
    for path in PACKAGE:
        assert (path.parent / "__init__.py").is_file(), (
            f"{relative(path.parent)} would not get into the wheel"
        )


def test_import_hfpar_loads_no_torch():
    code = "import sys, hfpar, hfpar.errors, hfpar.config.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_path_of_one_machine_in_tracked_files():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    machine_path = re.compile(r"(?<![\w.])/(home|work|root|Users)/\w")
    for name in listing.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".toml", ".txt", ".json", ""}:
            assert not machine_path.search(path.read_text(encoding="utf-8")), name
