"""Token batches: shuffled documents, packed into one stream, cut into rows. Same seed, same rows."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipe.chat import chat_examples
from recipe.corpus import Corpus
from recipe.tokenizer import EOS

CHAT_SHARE = 0.04  # of the training bytes


def encode_documents(tokenizer: Tokenizer, corpus: Corpus) -> list[Tensor]:
    """One int32 tensor per document: <|bos|> text <|eos|>, files first, then chat examples."""
    files = tokenizer.encode_batch([f.text for f in corpus.train])
    chats = chat_examples(corpus.train, int(CHAT_SHARE * corpus.train_bytes))
    conversations = tokenizer.encode_batch(chats, add_special_tokens=False)
    eos_id = tokenizer.token_to_id(EOS)
    return [torch.tensor([*e.ids, eos_id], dtype=torch.int32) for e in (*files, *conversations)]


@dataclass(slots=True)
class Position:
    """The position of the training in its data; all that a resumed run needs."""

    epoch: int = 0
    next_chunk: int = 0


class Batches:
    """Hands out rows of `row_len` + 1 tokens.

    The stream is cut into chunks of `chunk_len` and the chunks are shuffled. Short rows are slices of chunks,
    and a batch takes the same slice of as many chunks as it has rows, so its rows come from different places.
    """

    def __init__(self, documents: list[Tensor], chunk_len: int, seed: int, position: Position) -> None:
        self.documents = documents
        self.chunk_len = chunk_len
        self.seed = seed
        self.position = position
        self._queue: list[Tensor] = []
        self._chunks = self._chunks_of_epoch()

    def next(self, num_rows: int, row_len: int) -> Tensor:
        """Return the next batch, int64 [num_rows, row_len + 1].

        Rows overlap by the one token that is predicted.
        """
        if not self._queue or self._queue[0].shape != (num_rows, row_len + 1):
            chunks = self._take(num_rows)
            self._queue = [chunks[:, i : i + row_len + 1] for i in range(0, self.chunk_len, row_len)]
        return self._queue.pop(0).long()

    def _take(self, num_chunks: int) -> Tensor:
        """[num_chunks, chunk_len + 1]; a new epoch starts where the rest of this one is too short."""
        if self.position.next_chunk + num_chunks > len(self._chunks):
            self.position.epoch += 1
            self.position.next_chunk = 0
            self._chunks = self._chunks_of_epoch()
        start = self.position.next_chunk
        self.position.next_chunk += num_chunks
        return self._chunks[start : start + num_chunks]

    def _chunks_of_epoch(self) -> Tensor:
        """[chunks, chunk_len + 1], documents and chunks shuffled anew in each epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.position.epoch)
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        stream = torch.cat([self.documents[i] for i in order])
        chunks = stream.unfold(0, self.chunk_len + 1, self.chunk_len)
        return chunks[torch.randperm(len(chunks), generator=generator)]
