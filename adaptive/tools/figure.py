"""How every picture looks: readable in print and in black and white, colour-blind safe.

Colours are those of Okabe & Ito 2008 ("Color Universal Design"); each line has a dash and a marker of its own
too, so that none is told by colour alone.
To add one: a panel is an axis of `panels`, a line `axis.plot(..., **series(k))`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptive.config import BadSetting

BLACK, GREY = "#000000", "#8c8c8c"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL = (3.35, 2.35)  # inches; two are a page wide


def series(k: int) -> dict[str, Any]:
    """Colour, dash and marker of the k-th line."""
    return {
        "color": COLORS[k % len(COLORS)], "linestyle": DASHES[k % len(DASHES)],
        "marker": MARKERS[k % len(MARKERS)], "markersize": 4, "linewidth": 1.3,
    }  # fmt: skip


def panels(rows: int, columns: int, height: float = PANEL[1], **options: Any) -> tuple[Any, Any]:
    """(figure, axes) without a window; ImportError without matplotlib. `options` go to plt.subplots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
        "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
        "axes.grid": True, "grid.color": "#e0e0e0", "grid.linewidth": 0.5, "axes.axisbelow": True,
        "svg.fonttype": "none", "pdf.fonttype": 42, "savefig.dpi": 220,
    }  # fmt: skip
    plt.rcParams.update(style)
    figsize = (PANEL[0] * columns, height * rows)
    return plt.subplots(rows, columns, figsize=figsize, layout="constrained", **options)


def log_scale(axis: Any, values: list[float] | None = None, base: int = 10) -> None:
    """A matplotlib Axis in logarithmic scale with plain numbers: at `values`, else at 1, 2, 5, 10, ..., or at
    powers of 2.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(
        FixedLocator(values) if values else LogLocator(base, (1, 2, 5) if base == 10 else (1,))
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:,.10g}"))


def finish(figure: Any, path: Path) -> None:
    """Write by the ending of the name; BadSetting where matplotlib knows no such picture."""
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise BadSetting(
            f"--out {path}: {' '.join(str(error).split())}; write NAME.png or NAME.svg"
        ) from None
    finally:
        plt.close(figure)
