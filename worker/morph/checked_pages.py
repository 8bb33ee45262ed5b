"""Where the bytes of a variant go, whoever brings them: the host's image, the checkpoint or another rank."""

from __future__ import annotations

import torch

from worker.memory import VirtualRange
from worker.morph.sums import ROW_BYTES, RowSums, num_rows
from worker.morph.variants_check import WrongVariant


class CheckedPages:
    """The mapped pages of one variant. What is put there is read again, and is what it should be, or
    WrongVariant is raised."""

    def __init__(
        self, what: str, target: VirtualRange, nbytes: int, sums: torch.Tensor | None, advice: str
    ) -> None:
        """nbytes: of the whole variant. sums: `row_sums` of it as it was made; None: nobody knows them, and
        nothing is checked. what, advice: for the error."""
        self._what, self._target, self._nbytes = what, target, nbytes
        self._sums, self._advice = sums, advice

    def read(self, begin: int, end: int) -> torch.Tensor:
        """uint8 [end - begin], a view; its pages must be mapped."""
        return self._target.tensor(torch.uint8, (end - begin,), offset_bytes=begin)

    def put(self, begin: int, source: torch.Tensor) -> None:
        """Contiguous uint8 [n], from the host or the device, to the bytes from `begin` on, where a row of
        `row_sums` begins; it ends with one, or with the variant."""
        end = begin + len(source)
        sums = RowSums(self.read(begin, end)) if self._sums is not None else None

        def take(start: int, stop: int) -> None:
            if sums:
                sums.take(start - begin, stop - begin)

        if source.device.type == "cpu":
            self._target.write(begin, source, take)
        else:
            self.read(begin, end).copy_(source)
            take(begin, end)
        if sums:
            self._hold_against(sums.found, begin // ROW_BYTES)

    def _hold_against(self, found: torch.Tensor, first: int) -> None:
        assert self._sums is not None
        wanted = self._sums[first : first + len(found)]
        if not found.equal(wanted):
            wrong = (found != wanted).nonzero().flatten() + first
            raise WrongVariant(
                f"{self._what}: {len(wrong)} of {num_rows(self._nbytes)} pieces of {ROW_BYTES} bytes are not"
                f" what was made, the first at byte {int(wrong[0]) * ROW_BYTES}; {self._advice}"
            )
