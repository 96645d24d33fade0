"""The bytes that a step of a model moves and its arithmetic, as plain numbers that the folder's shapes give."""

from __future__ import annotations

from msgspec import Struct


class Attention(Struct, frozen=True):
    """The layers of a model that cache keys and values in one way."""

    layers: int
    token_bytes: int  # of keys and values of one token in all of these layers
    window: int = 0  # positions that they see; 0: all

    def cached(self, context: float) -> float:
        """Return the bytes of keys and values that a row with so many tokens reads in a step."""
        return self.token_bytes * (min(context, self.window) if self.window else context)


class StepWork(Struct, frozen=True):
    """The work of one step of a model on one device."""

    model_type: str
    dtype: str
    quantization: str | None
    parameters: int
    layers: int
    hidden: int
    heads: int  # of queries
    head_dim: int
    kv_heads: int  # of the first layer with attention; 0: no layer has any
    read_bytes: int  # weights that a step reads whatever its rows are, without experts
    expert_bytes: int  # weights of all experts
    experts: int  # of a layer; 0: none
    experts_per_token: int
    row_parameters: int  # that a row multiplies by, the head included
    head_parameters: int
    attention: tuple[Attention, ...]
    state_bytes: int  # of the recurrent layers of one sequence
    adapter_bytes: int  # of one adapter of the asked rank on all linears, on the device
    adapter_parameters: int

    @property
    def token_bytes(self) -> int:
        """The bytes of keys and values of one token in all layers."""
        return sum(group.token_bytes for group in self.attention)

    def weights_read(self, rows: int) -> float:
        """Return the bytes of weights that a step of so many rows reads.

        Every row picks `experts_per_token` of a layer's experts. They are taken to be picked evenly, so that a share of
        1 - (1 - k/n)^rows of them is read.
        """
        if not self.experts:
            return float(self.read_bytes)
        missed = (1 - self.experts_per_token / self.experts) ** rows
        return self.read_bytes + self.expert_bytes * (1 - missed)

    def cached(self, context: float) -> float:
        """Return the bytes of keys and values that a row reads."""
        return sum(group.cached(context) for group in self.attention)

    def pairs(self, tokens: int) -> float:
        """Return the multiplications and additions of attention for a prompt of so many tokens, all layers."""
        seen = 0.0
        for group in self.attention:
            whole = tokens * tokens / 2
            cut = max(tokens - group.window, 0) ** 2 / 2 if group.window else 0.0
            seen += group.layers * (whole - cut)
        return 4 * self.heads * self.head_dim * seen
