"""The parts of sampling: filters, reproducible noise, and log-probabilities.

A random number is a hash of (seed, output position, token id), on every device. Log-probabilities
are those of the model itself, before temperature, penalties, bias and filters, as vLLM's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import TokenLogprobs

# Most likely tokens looked at before sorting the whole vocabulary: enough for nearly every top_p in use.
WINDOW = 256


def min_p_threshold(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the least score that min_p [R] allows, float32 [R, 1]. min_p 0 gives -inf."""
    return scores.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)


def candidates(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores [R, K] and ids, int64 [R, K], of the tokens that remain.

    Scores are -inf where a row has fewer than K. scores float32 [R, V]; top_k int64 [R] (0: off), top_p and
    min_p float32 [R]. top_p counts the tokens that top_k left as the whole, as Hugging Face and vLLM do.
    The likeliest token always remains.
    """
    vocab_size = scores.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    width = min(WINDOW, vocab_size)
    values, ids, enough = _ranked(scores, top_k, top_p, min_p, width)
    if not enough:
        values, ids, _ = _ranked(scores, top_k, top_p, min_p, vocab_size)
    return values, ids


def _ranked(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Find candidates among the `width` likeliest. Returns last whether no row can have more beyond them."""
    values, ids = scores.topk(width, dim=-1)
    rank = torch.arange(width, device=scores.device)
    in_top_k = rank < top_k.unsqueeze(1)
    # A row whose top_k reaches beyond the window is normalised over the vocabulary: exact when its top_k
    # is off, and when it is not, `enough` is only true of the whole vocabulary, where in_top_k is exact.
    kept = values.masked_fill(~in_top_k, -torch.inf)
    whole = torch.where(top_k > width, scores.logsumexp(dim=-1), kept.logsumexp(dim=-1)).unsqueeze(1)
    probs = (kept - whole).exp()
    before = probs.cumsum(dim=-1) - probs
    in_top_p = (before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    in_top_p[:, 0] = True
    in_min_p = values >= min_p_threshold(scores, min_p)
    remaining = in_top_k & in_top_p & in_min_p
    enough = width == scores.shape[1] or bool(
        ((top_k <= width) | (~remaining[:, -1] & (top_k >= scores.shape[1]))).all()
    )
    return values.masked_fill(~remaining, -torch.inf), ids, enough


U64 = np.uint64


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return one output of SplitMix64 (Steele, Lea and Flood, OOPSLA '14) for each state x, modulo 2^64."""
    with np.errstate(over="ignore"):
        z = x + U64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the key of each (seed, output position), int32 [R, 2]."""
    mixed = splitmix64(seeds ^ splitmix64(positions.astype(U64)))
    return mixed.view(np.int32).reshape(-1, 2)


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token [N] and num_top [N] others per row of logits float32 [N, V]."""
    logprobs = logits.log_softmax(dim=-1)
    targets = torch.from_numpy(token_ids).to(logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, targets).squeeze(1).tolist()
    width = min(int(num_top.max()), logits.shape[1])
    values, ids = logprobs.topk(width, dim=-1)
    return [
        TokenLogprobs(token_id=token, logprob=logprob, top_ids=top_ids[:n], top_logprobs=top[:n])
        for token, logprob, top_ids, top, n in zip(
            token_ids.tolist(), chosen, ids.tolist(), values.tolist(), num_top.tolist(), strict=True
        )
    ]
