"""An answer on the screen while it is being written, every token in the colour of its origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..outputs import Origin
from ..pieces import TextPieces
from ..visualization import MEANINGS

STYLES: dict[Origin, str] = {
    Origin.LOSSLESS: "green",
    Origin.DELTA: "bold magenta",
    Origin.RECOVERED: "red underline",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "",
}


class AnswerStreamer(BaseStreamer):
    """A streamer for `generate` that shows text as it comes and colours it once the origins are known.

    Use it as a context manager around the call. On a terminal the answer is drawn in place; anywhere else it is
    written plainly, piece by piece. Origins may come at any time, before or after their tokens, in one go or round by
    round: tokens without one are shown without colour.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The verifier's.
        console (`Console`): Where to show the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.pieces: list[str] = []
        self.origins: list[Origin] = []
        self._text = TextPieces(tokenizer)
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._prompt_seen = False

    def __enter__(self) -> AnswerStreamer:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._console.out()

    def put(self, value: Any) -> None:
        """Takes the prompt first, then the tokens of one round after another; see transformers' `BaseStreamer`."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        new = [self._text.push(token) for token in value.flatten().tolist()]
        self.pieces += new
        if self._live is None:
            self._console.out("".join(new), end="", highlight=False)
        self._draw()

    def put_origins(self, origins: Iterable[Origin]) -> None:
        """Takes the origins of the next tokens that have none yet."""
        self.origins += origins
        self._draw()

    def end(self) -> None:
        """Nothing is held back; see transformers' `BaseStreamer`."""

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(coloured(self.pieces, self.origins), refresh=True)


def coloured(pieces: list[str], origins: list[Origin]) -> RenderableType:
    """The text with every piece in the colour of its origin, indented."""
    text = Text()
    for index, piece in enumerate(pieces):
        text.append(piece, STYLES[origins[index]] if index < len(origins) else "")
    return Padding(text, (0, 2))


def legend(origins: list[Origin]) -> RenderableType:
    """What the colours mean, and how many tokens have each. Origins that do not occur are left out."""
    counts = Counter(origins)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    for origin, meaning in MEANINGS.items():
        if counts[origin]:
            share = f"{counts[origin] / len(origins):.0%}"
            grid.add_row(str(counts[origin]), share, Text(meaning, STYLES[origin]))
    return Group(Text(f"  {len(origins)} tokens, by where they came from", "dim"), Padding(grid, (0, 2)))
