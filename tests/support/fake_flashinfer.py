"""FlashInfer's two wrappers of paged attention in plain torch, with the arguments of the real ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor


@dataclass(slots=True)
class Planned:
    """The arguments of `plan`; `run` reads nothing else of the sequences."""

    qo_indptr: list[int]
    indptr: list[int]
    indices: Tensor
    last_page_len: list[int]
    sizes: tuple[int, int, int, int]  # heads of queries and of the cache, head_dim, page_size
    sm_scale: float

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Write causal attention [T, H, D] of pages [blocks, Hkv, page_size, D] to `out`."""
        heads, kv_heads, head_dim, page_size = self.sizes
        assert q.shape[1:] == (heads, head_dim) and keys.shape[1:] == (kv_heads, page_size, head_dim)
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        for s in range(len(self.last_page_len)):
            pages = self.indices[self.indptr[s] : self.indptr[s + 1]].long()
            context = (len(pages) - 1) * page_size + self.last_page_len[s]
            new = slice(self.qo_indptr[s], self.qo_indptr[s + 1])
            k, v = (
                one[pages].transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(heads // kv_heads, 0)
                for one in (keys.float(), values.float())
            )
            length = new.stop - new.start
            seen = torch.ones(length, context, dtype=torch.bool).tril(context - length)
            scores = (q[new].float().transpose(0, 1) @ k.transpose(1, 2)) * self.sm_scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[new] = (weights @ v).transpose(0, 1).to(out.dtype)


class FakeDecodeWrapper:
    """One new token of each sequence."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert kv_layout == "HND" and backend == "fa2" and (None not in buffers) == use_cuda_graph
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        each = list(range(len(last_page_len) + 1))
        self._planned = _planned(each, indptr, indices, last_page_len, sizes, sm_scale)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        self._planned.attend(q, *paged_kv_cache, out)
        return out


class FakePrefillWrapper:
    """One or more new tokens of each sequence."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        assert kv_layout == "HND" and backend in ("fa2", "fa3")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        indptr = qo_indptr.tolist()
        self._planned = _planned(
            indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, sm_scale
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        self._planned.attend(q, *paged_kv_cache, out)
        return out


def _planned(
    qo_indptr: list[int],
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    sizes: tuple[int, int, int, int],
    sm_scale: float,
) -> Planned:
    assert {one.dtype for one in (indptr, indices, last_page_len)} == {torch.int32}
    return Planned(qo_indptr, indptr.tolist(), indices, last_page_len.tolist(), sizes, sm_scale)


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make `import flashinfer` give a module with these wrappers; return it."""
    fake = ModuleType("flashinfer")
    fake.BatchDecodeWithPagedKVCacheWrapper = FakeDecodeWrapper  # type: ignore[attr-defined]
    fake.BatchPrefillWithPagedKVCacheWrapper = FakePrefillWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    return fake
