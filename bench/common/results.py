"""Where benchmarks find the repository and the demo model, and where they write their results."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DEMO: Final = ROOT / "models" / "demo"
RESULTS: Final = ROOT / "bench" / "results"
