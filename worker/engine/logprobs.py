"""Log-probabilities of the model itself: log-softmax of the logits as they left the model.

Temperature, penalties, bias and filters do not enter, so the numbers compare across requests, as vLLM's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of one token [N] per row of logits float32 [N, V].

    num_top [N]: how many alternatives each has.
    """
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
