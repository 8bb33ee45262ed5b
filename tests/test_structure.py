"""The shape of the repository: who may import whom, and that the documentation names real things."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
WORKER_ONLY = ("torch", "triton", "numba", "safetensors")
SERVICES = ("gateway", "monitor", "controller")
POOR_FIRST_WORD = re.compile(  # leaves the subject of a docstring to be guessed
    r"(Of|Or|And|But|What|Whoever|Whether|Who|That|It|Its|They|Those|As|By|For|From|In|To|With|Where|While"
    r"|Nobody|Nothing|Once|Here)\b"
)
PRODUCT = ("bus", "gateway", "monitor", "controller", "worker", "kernels", "instar")
AFTER_ITS_START = {"gateway": "sys.modules['gateway.text.template'].warm_up()"}


def modules_of(package: str) -> list[str]:
    names = [module_name(path) for path in sorted((ROOT / package).rglob("*.py"))]
    return [name for name in names if not name.endswith("__main__")]


def test_packages_import_along_the_arrows_only() -> None:
    checker = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([checker, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_a_device_loads_nothing_of_torch(service: str) -> None:
    """At run time, since a library may bring it in where no import of ours says so."""
    code = (
        f"import importlib, sys\nfor name in {modules_of(service)!r}: importlib.import_module(name)\n"
        f"{AFTER_ITS_START.get(service, '')}\n"
        f"print([name for name in {WORKER_ONLY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_engine_imports_nothing_that_a_bare_gpu_machine_lacks() -> None:
    """`make gpu` finds Python with torch and triton: no Redis, msgspec or pydantic."""
    allowed = {"numpy", "torch", "triton", "numba", "llvmlite", "safetensors", "transformers"}
    allowed |= {"huggingface_hub", "cuda", "pynvml", "kernels", "worker"} | sys.stdlib_module_names
    # Standard library only.
    names = ("messages", "fields", "histogram", "levers", "pages", "precisions", "families", "prefix_keys")
    shared = tuple(f"bus.{name}" for name in (*names, "checkpoints", "pulled", "variants"))
    folders = ("kernels", "worker/engine", "worker/memory", "worker/model")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / f"{name.replace('.', '/')}.py" for name in (*shared, "worker.service.nvml")]
    foreign = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports_of(path)
        if name.split(".")[0] not in allowed and name not in shared and name.rpartition(".")[0] not in shared
    }
    assert foreign == set()


@dataclass(frozen=True)
class Source:
    """The facts about a file that the tests ask for, so that each is parsed once."""

    imports: set[str]  # full names of the modules that it imports, anywhere in it
    members: list[tuple[str, list[str]]]  # of each `from module import names`
    classes: list[str]
    docstrings: list[tuple[int, str]]  # with their lines


@cache
def source_of(path: Path) -> Source:
    source = Source(set(), [], [], [])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            source.imports.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            source.members.append((node.module or "", [alias.name for alias in node.names]))
            if not node.level:
                source.imports.add(node.module or "")
        if isinstance(node, ast.ClassDef):
            source.classes.append(node.name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            source.docstrings.append((getattr(node, "lineno", 1), text))
    return source


def imports_of(path: Path) -> set[str]:
    return source_of(path).imports


def test_benchmarks_import_no_test() -> None:
    """Benchmarks run without the tests' folder and their requirements."""
    files = (ROOT / "bench").rglob("*.py")
    found = {path: name for path in files for name in imports_of(path) if name.split(".")[0] == "tests"}
    assert found == {}


def test_the_product_imports_neither_tests_nor_benchmarks_and_those_import_no_test() -> None:
    importers = dict.fromkeys(PRODUCT, ("tests", "bench")) | {"bench": ("tests",)}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for package, forbidden in importers.items()
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] in forbidden
    }
    assert found == set()


def test_a_class_name_stands_for_one_class_in_the_product() -> None:
    """Names with an underscore in front count too: a reader searches for them all the same."""
    places: dict[str, list[str]] = {}
    for path in product_files():
        for name in source_of(path).classes:
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    duplicates = {name: found for name, found in places.items() if len(found) > 1}
    assert duplicates == {}


def test_a_docstring_begins_with_what_the_thing_is_or_does() -> None:
    missing = {
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for folder in (*PRODUCT, "bench", "models")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in source_of(path).docstrings
        if POOR_FIRST_WORD.match(text)
    }
    assert sorted(missing) == []


def test_no_modules_of_the_product_import_each_other() -> None:
    """Imports inside functions and for type checkers count: a cycle cannot be read in any order."""
    assert sorted(sorted(cycle) for cycle in import_cycles()) == []


def import_cycles() -> set[frozenset[str]]:
    """The largest sets of modules of the product in which each one imports every other, directly or not."""
    paths = {module_name(path): path for path in product_files()}
    imports = {name: project_imports(path, paths) - {name} for name, path in paths.items()}
    reached = {name: _reachable(name, imports) for name in imports}
    return {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }


def _reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that `start` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def project_imports(path: Path, modules: Collection[str]) -> set[str]:
    """The modules among `modules` that a file imports, anywhere in it."""
    known, found = set(modules), set(imports_of(path))
    for module, names in source_of(path).members:
        members = {f"{module}.{name}" for name in names} & known
        found |= members
        if len(members) == len(names):  # `from package import module` uses nothing of the package
            found.discard(module)
    return found & known


def product_files() -> list[Path]:
    return [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_kernels_have_no_version() -> None:
    """transformers looks for a package of that name by its version."""
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text()


# --------------------------------------------------------------------------- documentation


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_the_documentation_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_of_the_documentation_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", _code_of(document))) <= targets


@cache
def help_text() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "instar", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_the_documentation_exist(document: Path) -> None:
    named = set(re.findall(r"\binstar (serve|status|complete|settings|[a-z]+) ?", _code_of(document)))
    assert {name for name in named if not re.search(rf"^    {name} ", help_text(), re.MULTILINE)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_of_the_documentation_exist(document: Path) -> None:
    from bus.settings import SHORT_NAMES, Settings
    from bus.settings_sources import fields_of, variable_of

    text = _code_of(document)
    known = fields_of(Settings)
    variables = {variable_of(name) for name in known} | {f"INSTAR_{short}" for short in SHORT_NAMES}
    assert set(re.findall(r"\bINSTAR_[A-Z_]+[A-Z]\b", text)) <= variables
    dotted = set(re.findall(r"\b((?:redis|gateway|monitor|controller|worker|serve|log)\.[a-z_]+)\b", text))
    assert {name for name in dotted if not name.endswith((".py", ".md"))} <= known.keys()


def test_every_package_has_its_sentence_in_the_structure_page() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    for package in (*PRODUCT, "bench"):
        assert f"| `{package}/` |" in text
    folders = {path.parent.relative_to(ROOT) for path in product_files()}
    missing = [str(one) for one in folders if len(one.parts) == 2 and f"| `{one}/` |" not in text]
    assert sorted(missing) == []


def test_every_name_of_the_structure_page_exists() -> None:
    """References are written `path:Class.method`; a bare path in backticks is a file or a folder."""
    text = (ROOT / "docs" / "structure.md").read_text()
    references = set(re.findall(r"`([\w/]+\.py):([\w.]+)`", text))
    paths = set(re.findall(r"`([\w/]+(?:/|\.py))`", text))
    assert len(references) > 50  # the pattern finds them
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    missing = [f"{path}:{name}" for path, name in references if not _defines(ROOT / path, name)]
    assert sorted(missing) == []


def test_every_name_of_the_contributing_page_is_in_a_file_that_its_paragraph_links_to() -> None:
    found, missing = 0, []
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        texts = [(ROOT / path).read_text() for path in re.findall(r"\]\(([\w/]+\.py)\)", line)]
        for name in re.findall(r"`(?:[A-Z]\w+\.)?(_?[A-Za-z]\w*)`", line) if texts else []:
            found += 1
            if not any(re.search(rf"\b{name}\b", text) for text in texts):
                missing.append(name)
    assert found > 20  # the pattern finds them
    assert missing == []


def _defines(path: Path, name: str) -> bool:
    """Return whether a module defines a function, a class, or a member in the class's own body."""
    if not path.exists():
        return False
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        named = [node for node in body if _name_of(node) == part]
        if not named:
            return False
        body = getattr(named[0], "body", [])
    return True


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.Assign):
        target: ast.expr | None = node.targets[0]
    else:
        target = node.target if isinstance(node, ast.AnnAssign) else None
    return target.id if isinstance(target, ast.Name) else ""


def _code_of(document: Path) -> str:
    """Return what stands in code blocks and between backticks: what a reader will type."""
    text = document.read_text()
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
