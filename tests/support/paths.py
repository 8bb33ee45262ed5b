"""Paths of the repository that tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MODELS: Final = ROOT / "models"
DEMO_MODEL: Final = MODELS / "demo"
TRACES: Final = ROOT / "tests" / "traces"
