"""A small SVG canvas: shapes are appended in drawing order, the size is known at the end."""

from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, MUTED, FAINT, BAND = "#1f2933", "#66737f", "#d5dbe1", "#f4f6f8"
# Colours that stay apart for colour-blind readers (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, SKY, RED, PURPLE = (
    "#0072b2",
    "#d98200",
    "#009e73",
    "#56b4e9",
    "#d55e00",
    "#b5659a",
)


class Canvas:
    """Shapes in pixels, the origin at the top left."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        round: float = 0,
        hint: str = "",
    ) -> None:
        """Add a filled rectangle; `hint` shows when the pointer rests on it."""
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._shapes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'rx="{round:g}" fill="{fill}">{title}</rect>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1
    ) -> None:
        """Add a straight line."""
        self._shapes.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" '
            f'stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str) -> None:
        """Add a line with an arrowhead at its second end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        along = ((x2 - x1) / length, (y2 - y1) / length)
        across = (-along[1], along[0])
        back, half = 7.0, 3.5
        foot = (x2 - back * along[0], y2 - back * along[1])
        left = (foot[0] + half * across[0], foot[1] + half * across[1])
        right = (foot[0] - half * across[0], foot[1] - half * across[1])
        self.line(x1, y1, *foot, stroke, 1.6)
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in ((x2, y2), left, right))
        self._shapes.append(f'<polygon points="{points}" fill="{stroke}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        weight: int = 400,
    ) -> None:
        """Add text whose baseline is at y; `anchor` is start, middle or end."""
        self._shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        )

    def document(self, width: float, height: float) -> str:
        """Return the whole picture as an SVG document."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{escape(FONT)}">\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
            + "\n".join(self._shapes)
            + "\n</svg>\n"
        )


def text_width(words: str, size: float) -> float:
    """Return about how wide `words` are in a font of `size` pixels."""
    return 0.58 * size * len(words)
