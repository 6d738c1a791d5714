"""Random numbers as Python numbers."""

from __future__ import annotations

import torch

AT_ONCE = 256
"""Numbers drawn together: one call of PyTorch's generator takes as long as hundreds of numbers do."""


class Uniforms:
    """Random numbers in [0, 1), from PyTorch's generator of the CPU, in float32, each handed out once."""

    def __init__(self) -> None:
        self._drawn: list[float] = []

    def take(self, count: int) -> list[float]:
        """Some that nobody has had yet.

        Args:
            count (`int`): How many, at least 1.
        """
        if len(self._drawn) < count:
            self._drawn += torch.rand(max(count, AT_ONCE), dtype=torch.float32).tolist()
        taken = self._drawn[-count:]
        del self._drawn[-count:]
        return taken
