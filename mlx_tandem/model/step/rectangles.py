"""The division of a step's rows into rectangles: the rows of each forward."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.engine.plan import Row
from mlx_tandem.model import backend
from mlx_tandem.model.step.shapes import blocks_read, cut, split_by_context
from mlx_tandem.model.step.verify import goes_with_decodes

COMMON_OFFSET_TOKENS = 256
"""Fewest tokens of a chunk after a context that are worth a forward of their own where masks make attention slow."""


class Rectangles:
    """Divides the rows of a plan into forwards, within the limits of one forward.

    Attributes:
        fused_length: Up to so many tokens per row, kernels read the pool in place: the forward needs no memory for
            gathered keys, and short contexts are not padded to the length of long ones. 0: no kernels do.
        limits: The most positions and pairs of query and key of one forward.
        gathered_share: As in `Forward`; 1 until the owner sets it.
        groups: Whether at least one layer has a kernel for adjacent rows of one sequence; False until it is set.
        common_offsets: Whether rows that begin at one position are read without a mask.
    """

    def __init__(
        self,
        block_size: int,
        window: int | None,
        fused_length: int,
        limits: StepLimits,
        row_counts: Sequence[int],
        *,
        unpadded: bool = False,
    ):
        """Create it. `unpadded`: the tokens of rows are not padded, and rows that begin are apart from others."""
        self.fused_length = fused_length
        self.limits = limits
        self.common_offsets = backend.current().arithmetic.masks_are_slow
        self._block_size = block_size
        self._window = window  # of the first pool
        self._row_counts = row_counts
        self.unpadded = unpadded
        self.gathered_share = 1.0
        self.groups = False

    def of(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of the rows of each forward.

        Rows are grouped by padded length, apart if they need the logits of all positions, and split where their
        contexts differ much. Groups that would need more memory than the limits allow are cut.
        """
        decodes = [i for i, r in enumerate(rows) if self._goes_with_decodes(r)]
        usual = (1, False, False, None, False, False)
        by_length: dict[tuple[int, bool, bool, int | None, bool, bool], list[int]] = {usual: decodes} if decodes else {}
        for i, r in enumerate(rows) if len(decodes) < len(rows) else ():
            if self._goes_with_decodes(r):
                continue
            common_offset = self.common_offset([r])
            apart = None if common_offset is None else i if common_offset else -1
            begins = self.unpadded and r.start == 0
            length = self.length(len(r.tokens))
            shows = length == 1 and bool(r.images)
            by_length.setdefault((length, bool(r.targets), r.pooling is not None, apart, begins, shows), []).append(i)
        pieces = []
        for (length, *_), group in by_length.items():
            if length <= self.fused_length:
                pieces += self._within_states(group, rows, length)
                continue
            blocks = {i: blocks_read(rows[i], self._block_size, self._window) for i in group}
            if length == 1:  # each token of such a row reads its blocks by itself
                blocks = {i: n * len(rows[i].tokens) for i, n in blocks.items()}
            positions = min(self.limits.positions, self.limits.pairs // length)
            for part in split_by_context(group, blocks):
                for piece in cut(part, blocks, positions // self._block_size, self.good_counts(length)):
                    pieces += self._within_states(piece, rows, length)
        return pieces

    def of_drafting(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of the rows of each forward of a plan whose rows draw several tokens each."""
        blocks = {i: blocks_read(r, self._block_size, self._window) for i, r in enumerate(rows)}
        return split_by_context(range(len(rows)), blocks)

    def _within_states(self, group: list[int], rows: Sequence[Row], length: int) -> list[list[int]]:
        """Return the rows in pieces whose states one forward may hold: one for each row, or for each draft.

        If all rows have one token, go on from a state and verify nothing, only the share that is gathered counts.
        """
        apart = any(len(rows[i].tokens) > 1 or rows[i].slack or rows[i].start == 0 for i in group)
        share = 1.0 if apart else self.gathered_share
        pieces: list[list[int]] = [[]]
        held = 0.0
        for i in group:
            own = share * (len(rows[i].tokens) if length == 1 else 1)
            if pieces[-1] and held + own > self.limits.rows:
                pieces.append([])
                held = 0.0
            pieces[-1].append(i)
            held += own
        return pieces

    def length(self, tokens: int) -> int:
        """Return the length of a forward whose longest row has so many tokens."""
        return tokens if self.unpadded or tokens == 1 else padded_length(tokens)

    def _goes_with_decodes(self, row: Row) -> bool:
        """Return whether the tokens of a row are computed in the forward of the decoding rows."""
        return goes_with_decodes(row) and not (self.unpadded and row.start == 0)

    @property
    def gathers(self) -> bool:
        """Whether keys and values are copied for each row, since no kernel reads the pool."""
        return not self.fused_length

    def good_counts(self, length: int) -> Sequence[int]:
        """Return the good row counts for rows of one token; padding longer rows would cost much."""
        return self._row_counts if length == 1 else ()

    def common_offset(self, rows: Sequence[Row]) -> int | None:
        """Return the `common_offset` of `StepView` for rows of one forward."""
        start, length = rows[0].start, len(rows[0].tokens)
        worth = length > max(1, self.fused_length) if start == 0 else len(rows) == 1 and length >= COMMON_OFFSET_TOKENS
        return start if self.common_offsets and worth and all(r.start == start for r in rows) else None
