"""Filters of the tokens that may be drawn: top_k, top_p and min_p, in plain torch."""

from __future__ import annotations

import torch


def min_p_threshold(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the least score that min_p [R] allows, float32 [R, 1]. min_p 0 gives -inf."""
    return scores.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)


def ranked(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the tokens that remain among the `width` likeliest: scores [R, width], -inf for others, and ids.

    Returns last, bool [R], which rows can have no more beyond them. scores float32 [R, V]; top_k int64 [R]
    (0: off), top_p and min_p float32 [R]. top_p counts the tokens that top_k left as the whole, as Hugging
    Face and vLLM do. The likeliest token always remains.
    """
    vocab_size = scores.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    values, ids = scores.topk(width, dim=-1)
    rank = torch.arange(width, device=scores.device)
    in_top_k = rank < top_k.unsqueeze(1)
    # A row whose top_k reaches beyond the window is normalised over the vocabulary: exact when its top_k
    # is off, and when it is not, it has enough in the whole vocabulary only, where in_top_k is exact.
    kept = values.masked_fill(~in_top_k, -torch.inf)
    whole = torch.where(top_k > width, scores.logsumexp(dim=-1), kept.logsumexp(dim=-1)).unsqueeze(1)
    probs = (kept - whole).exp()
    before = probs.cumsum(dim=-1) - probs
    in_top_p = (before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    in_top_p[:, 0] = True
    remaining = in_top_k & in_top_p & (values >= min_p_threshold(scores, min_p))
    enough = (top_k <= width) | (~remaining[:, -1] & (top_k >= vocab_size))
    return values.masked_fill(~remaining, -torch.inf), ids, enough | (width == vocab_size)
