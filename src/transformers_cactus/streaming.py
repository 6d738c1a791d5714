"""Streamers, which expect one token at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .outputs import Origin


class TokenByToken(BaseStreamer):
    """Hands tokens on as plain `generate` does: one by one, each in a tensor of shape `[1]` on the CPU.

    transformers' assisted decoding sends a round's tokens in one tensor of shape `[1, tokens]`, which a streamer
    written against plain `generate` does not expect.

    Args:
        streamer: The user's streamer.
    """

    def __init__(self, streamer: Any):
        self.streamer = streamer

    def put(self, value: Tensor) -> None:
        """Passes on every token of `value`, of any shape."""
        for token in value.flatten().cpu():
            self.streamer.put(token[None])

    def put_origins(self, origins: list[Origin]) -> None:
        """Tells a streamer that has a method `put_origins` where a round's tokens came from.

        Called once per round with as many [`Origin`]s as tokens, before the round's tokens or right after them.
        """
        if hasattr(self.streamer, "put_origins"):
            self.streamer.put_origins(origins)

    def end(self) -> None:
        """Passes the end on."""
        self.streamer.end()
