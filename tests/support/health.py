"""docker/healthy.py as a module: it belongs to no package."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from tests.support.paths import ROOT


def _load() -> ModuleType:
    spec = spec_from_file_location("healthy", ROOT / "docker" / "healthy.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


healthy = _load()
