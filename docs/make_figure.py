"""Draws docs/images/raising.svg: what a budget makes of a verifier's distribution, with this package's own numbers."""

from pathlib import Path

from transformers_cactus import gamma_star

TOKENS = ["the", "a", "its", "many", "long"]
DRAFT = [0.20, 0.45, 0.20, 0.10, 0.05]
VERIFIER = [0.45, 0.20, 0.15, 0.15, 0.05]
DRAFTED, DELTA = 1, 0.1
BAR, GROUP, HEIGHT, LEFT, TOP = 26, 112, 220, 24, 46
COLOURS = {"draft p": "#9aa0a6", "verifier q": "#2188c9", f"target h at delta {DELTA}": "#bf40bf"}


def main() -> None:
    """Writes the figure."""
    gamma = gamma_star(VERIFIER[DRAFTED], DELTA)
    scale = (1 - gamma) / (1 - VERIFIER[DRAFTED])
    target = [gamma if place == DRAFTED else scale * value for place, value in enumerate(VERIFIER)]
    bottom, parts = TOP + HEIGHT, []
    for series, (values, (name, colour)) in enumerate(zip((DRAFT, VERIFIER, target), COLOURS.items(), strict=True)):
        parts.append(f'<rect x="{LEFT + 190 * series}" y="8" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 190 * series + 20}" y="20">{name}</text>')
        for place, value in enumerate(values):
            left, tall = LEFT + GROUP * place + (BAR + 2) * series, value * HEIGHT / 0.6
            top = bottom - tall
            parts.append(
                f'<rect x="{left}" y="{top:.1f}" width="{BAR}" height="{tall:.1f}" fill="{colour}"/>'
                f'<text x="{left + BAR / 2}" y="{top - 4:.1f}" text-anchor="middle" font-size="10">{value:.2f}</text>'
            )
    for place, token in enumerate(TOKENS):
        label = f"“{token}”, drafted" if place == DRAFTED else f"“{token}”"
        parts.append(f'<text x="{LEFT + GROUP * place + 41}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
    accept = [min(1, raised / DRAFT[DRAFTED]) for raised in (VERIFIER[DRAFTED], gamma)]
    parts.append(
        f'<text x="{LEFT}" y="{bottom + 46}">Accepted with probability h/p = {accept[1]:.2f}, '
        f"and q/p = {accept[0]:.2f} without a budget.</text>"
    )
    width, height = LEFT + GROUP * len(TOKENS), bottom + 60
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" fill="#444"><rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
    (Path(__file__).parent / "images" / "raising.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
