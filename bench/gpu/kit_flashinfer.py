"""FlashInfer in a kit: its Python code, and the kernels that `python -m bench.gpu attention` calls, compiled.

`pack` compiles what is not kept from an earlier time, for GPUs of capability 9.0. It needs nvcc of CUDA 13
and ninja, no GPU, and some ten minutes on two cores. FlashInfer loads what lies in its folder data/aot and
compiles nothing then. Where CUDA's folder has no curand_kernel.h, which fa3 includes, or no stub of libcuda,
say where they are in FLASHINFER_EXTRA_CUDAFLAGS and FLASHINFER_EXTRA_LDFLAGS.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from bench.common.results import ROOT, say

ARCH = "9.0a"
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instar" / "gpu-kit"
AOT = "flashinfer/data/aot"
# What importing FlashInfer and its attention loads none of: 7 MB of 16.
LEFT_OUT = (
    *("flashinfer/moe_ep/", "flashinfer/fused_moe/cute_dsl/", "flashinfer/cute_dsl/attention/"),
    *("flashinfer/attention/prims_ts/", "flashinfer/experimental/b12x/"),
    "flashinfer/experimental/cake_vsa_sm90_cute/",
)
SOURCES = re.compile(r"flashinfer/data/csrc/(batch_|[^/]*\.jinja$)")  # read also where nothing is compiled


def pack(folder: Path) -> str:
    """Replace FlashInfer's wheel by a small one with compiled kernels; return what is lacking here."""
    for tool in ("nvcc", "ninja"):
        if shutil.which(tool) is None:
            return (
                f"FlashInfer's kernels are compiled here, which needs {tool}: install it or leave --with out"
            )
    (wheel,) = folder.glob("flashinfer_python-*.whl")
    kept = KEPT / wheel.stem
    trim(wheel, compiled(kept, wheel))
    return ""


def is_needed(name: str) -> bool:
    """Return whether a file of the wheel is packed."""
    if name.startswith("flashinfer/data/"):
        return SOURCES.match(name) is not None
    return (name.endswith((".py", ".json")) and not name.startswith(LEFT_OUT)) or ".dist-info/" in name


def trim(wheel: Path, modules: list[Path]) -> None:
    """Rewrite the wheel with what is needed of it, and the compiled modules."""
    whole = wheel.with_suffix(".whole")
    wheel.rename(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            if is_needed(info.filename):
                new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED)
        for module in modules:
            new.write(module, f"{AOT}/{module.stem}/{module.name}")
    whole.unlink()


def compiled(kept: Path, wheel: Path) -> list[Path]:
    """Return the compiled modules, in `kept`; compile those that are not there, in a process of its own."""
    site = kept / "site"
    if not site.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
        tvm_ffi = next(path.name.split("-")[1] for path in wheel.parent.glob("apache_tvm_ffi-*.whl"))
        subprocess.run([*pip, "--target", str(site), str(wheel), f"apache-tvm-ffi=={tvm_ffi}"], check=True)
    path = os.pathsep.join([str(site), str(ROOT)])
    say(f"compiling FlashInfer's kernels for {ARCH}, where {kept} has them not yet")
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu.kit_flashinfer"],
        env=os.environ
        | {"PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": str(kept), "FLASHINFER_CUDA_ARCH_LIST": ARCH},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Path(line) for line in ran.stdout.splitlines() if line.endswith(".so")]


def main() -> int:
    """Compile the modules of bfloat16 attention with heads of 128, and say where each lies."""
    torch: Any = importlib.import_module("torch")
    modules: Any = importlib.import_module("flashinfer.jit.attention.modules")
    dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    plain = (128, 128, 0, False, False)  # head dims, no positions, no window, no cap
    for spec in (
        modules.gen_batch_decode_module(*dtypes, *plain),
        # The module that the wrapper takes where keys and values have equal strides.
        modules._gen_batch_prefill_primary_module("fa2", *dtypes, *plain, False),
        modules.gen_batch_prefill_module("fa3", *dtypes, *plain, False),
    ):
        if not spec.jit_library_path.exists():
            spec.build(verbose=False)
        say(str(spec.jit_library_path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
