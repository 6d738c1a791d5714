"""Where an output's tokens came from and what they cost, to look at: HTML for notebooks, rich text for terminals."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from .conversation import Reply
from .outputs import AcceptanceStatistics, Origin, SequenceStatistics
from .pieces import TextPieces

if TYPE_CHECKING:
    from rich.text import Text

MEANINGS: dict[Origin, str] = {
    Origin.LOSSLESS: "drafted, kept as lossless speculative sampling would",
    Origin.DELTA: "drafted, kept thanks to the relaxed rule",
    Origin.RECOVERED: "drawn again after a rejection",
    Origin.BONUS: "drawn by the verifier after a fully kept block",
    Origin.PLAIN: "drawn by the verifier, nothing was drafted",
}
"""What each origin means, for legends."""

COLOURS: dict[Origin, tuple[int, int, int]] = {
    Origin.LOSSLESS: (46, 160, 67),
    Origin.DELTA: (191, 64, 191),
    Origin.RECOVERED: (214, 72, 54),
    Origin.BONUS: (33, 136, 201),
    Origin.PLAIN: (128, 128, 128),
}
"""Red, green and blue of each origin."""

DARKEST = 1.0
"""Divergence in nats at which a token's background is darkest."""

BAR, GAP, UNIT = 9, 3, 12
"""Width of a bar, space between bars, and height of one token in the chart, in pixels."""


@dataclass(frozen=True)
class Visualization:
    """One sequence's tokens by origin and divergence, and its accepted lengths.

    A notebook shows it as it is; `rich.print` prints it; `html()` is a fragment for any page, without scripts.
    """

    pieces: list[str]
    """The text that each token adds."""
    statistics: SequenceStatistics
    """Its origins, divergences and rounds."""
    sequence: int = 0
    """Its place among the output's sequences."""
    sequences: int = 1
    """How many the output has."""

    def html(self) -> str:
        """The HTML fragment: tokens, legend, and a bar chart of the accepted lengths, one bar for each round."""
        tokens = "".join(map(_token, self.pieces, self.statistics.origins, self.statistics.divergence))
        summary = html.escape(str(AcceptanceStatistics([self.statistics])))
        heading = f'<div style="font-size:.85em;opacity:.8">{self._heading()}</div>' if self._heading() else ""
        return (
            '<div style="font-family:system-ui,sans-serif;max-width:60em;line-height:1.7">'
            f'{heading}<div style="white-space:pre-wrap">{tokens}</div>'
            f'<div style="margin-top:.8em;font-size:.85em">{self._legend()}</div>{self._chart()}'
            f'<div style="font-size:.85em;opacity:.8">{summary}</div></div>'
        )

    def _repr_html_(self) -> str:
        return self.html()

    def __rich__(self) -> Text:
        from rich.text import Text

        text = Text()
        if self._heading():
            text.append(f"{self._heading()}\n", "dim")
        for piece, origin, divergence in zip(
            self.pieces, self.statistics.origins, self.statistics.divergence, strict=True
        ):
            text.append(piece, _rich_style(origin, divergence))
        text.append("\n")
        for origin, count in self._counts():
            text.append(f"\n{count:5}  ", "default")
            text.append(MEANINGS[origin], _rich_style(origin, 0.0))
        text.append(f"\n\n{AcceptanceStatistics([self.statistics])}", "dim")
        return text

    def _heading(self) -> str:
        """Which sequence of a batch this is."""
        if self.sequences == 1:
            return ""
        return f"Sequence {self.sequence} of {self.sequences}, counted from 0; sequence=... shows another."

    def _counts(self) -> Iterator[tuple[Origin, int]]:
        counts = Counter(self.statistics.origins)
        return ((origin, counts[origin]) for origin in MEANINGS if counts[origin])

    def _legend(self) -> str:
        entries = [
            f"{_token('&nbsp;' * 3, origin, DARKEST / 4, escaped=True)} {count} {html.escape(MEANINGS[origin])}"
            for origin, count in self._counts()
        ]
        return "<br>".join([*entries, f"Darker: further from the verifier, up to {DARKEST:g} nat."])

    def _chart(self) -> str:
        rounds = list(_rounds(self.statistics))
        tallest = max((drafted for drafted, _ in rounds), default=0)
        if not tallest:
            return ""
        width, height = 30 + len(rounds) * (BAR + GAP), UNIT * tallest
        bars = "".join(_bar(30 + i * (BAR + GAP), height, *entry) for i, entry in enumerate(rounds))
        ticks = "".join(
            f'<text x="22" y="{4 + height - UNIT * n + 4}" text-anchor="end">{n}</text>' for n in (0, tallest)
        )
        return (
            '<div style="overflow-x:auto;margin:.8em 0"><div style="font-size:.85em">Accepted length of each round '
            f'(outline: drafted)</div><svg width="{width}" height="{height + 8}" fill="currentColor" font-size="10" '
            f'role="img" aria-label="accepted lengths">{ticks}{bars}</svg></div>'
        )


def visualize(output: Any, tokenizer: PreTrainedTokenizerBase, sequence: int = 0) -> Visualization:
    """Shows where the tokens of an output came from.

    Args:
        output (`ModelOutput` or [`Reply`]): What `generate` returned with cactus options and
            `return_dict_in_generate=True`, or a conversation's answer.
        tokenizer (`PreTrainedTokenizerBase`): The verifier's.
        sequence (`int`, *optional*, defaults to 0): Which of the returned sequences, counted from 0.

    Returns:
        [`Visualization`]: With an HTML representation for notebooks, and one for rich.

    Raises:
        TypeError: If the output carries no statistics, or the tokenizer is none.
        IndexError: If there is no such sequence.

    Example:
        ```python
        output = model.generate(
            **inputs, assistant_model=draft, do_sample=True, cactus_delta=0.75, return_dict_in_generate=True
        )
        visualize(output, tokenizer)  # as the last line of a notebook's cell
        ```
    """
    if isinstance(output, Reply):
        output = output.output
    acceptance = getattr(output, "acceptance", None)
    if not isinstance(acceptance, AcceptanceStatistics):
        raise TypeError(
            "visualize() needs an output with acceptance statistics: call generate() with cactus options and "
            "return_dict_in_generate=True."
        )
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"visualize() needs the verifier's tokenizer, which has decode(), got {type(tokenizer).__name__}."
        )
    if not 0 <= sequence < len(acceptance.sequences):
        raise IndexError(f"there is no sequence {sequence}: the output has {len(acceptance.sequences)}.")
    statistics = acceptance.sequences[sequence]
    prompt = output.sequences.shape[1] - max(len(one.origins) for one in acceptance.sequences)
    tokens = output.sequences[sequence, prompt : prompt + len(statistics.origins)].tolist()
    text = TextPieces(tokenizer)
    pieces = [text.push(token) for token in tokens]
    return Visualization(pieces, statistics, sequence, len(acceptance.sequences))


def _shade(divergence: float) -> float:
    """How dark, from 0 to 1: small divergences are common, and the root makes them visible."""
    return math.sqrt(min(divergence / DARKEST, 1.0)) if math.isfinite(divergence) else 1.0


def _token(piece: str, origin: Origin, divergence: float, *, escaped: bool = False) -> str:
    colour = "{},{},{}".format(*COLOURS[origin])
    return (
        f'<span title="{origin.value}, {divergence:.3f} nats" style="border-bottom:2px solid rgb({colour});'
        f'background:rgba({colour},{0.08 + 0.6 * _shade(divergence):.2f})">{piece if escaped else html.escape(piece)}'
        "</span>"
    )


def _rich_style(origin: Origin, divergence: float) -> str:
    red, green, blue = COLOURS[origin]
    if divergence == 0:
        return f"rgb({red},{green},{blue})"
    dark = 0.35 + 0.55 * _shade(divergence)
    return f"white on rgb({red * dark:.0f},{green * dark:.0f},{blue * dark:.0f})"


def _rounds(statistics: SequenceStatistics) -> Iterator[tuple[int, list[Origin]]]:
    """Drafted tokens of each round, and the origins of those that were accepted."""
    place = 0
    for drafted, accepted in zip(statistics.drafted_per_round, statistics.accepted_per_round, strict=True):
        kept = statistics.origins[place : place + accepted]
        place += accepted
        if place < len(statistics.origins) and statistics.origins[place] not in (Origin.LOSSLESS, Origin.DELTA):
            place += 1
        yield drafted, kept


def _bar(left: int, height: int, drafted: int, kept: list[Origin]) -> str:
    top = 4 + height - UNIT * drafted
    outline = (
        f'<rect x="{left}" y="{top}" width="{BAR}" height="{UNIT * drafted}" fill="none" stroke="currentColor" '
        'stroke-opacity=".25"/>'
    )
    filled = "".join(
        f'<rect x="{left}" y="{4 + height - UNIT * (index + 1)}" width="{BAR}" height="{UNIT}" '
        f'fill="rgb{COLOURS[origin]}"/>'
        for index, origin in enumerate(kept)
    )
    return outline + filled
