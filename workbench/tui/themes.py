"""The themes, and which one to start with.

Four are the workbench's own: `dark` and `light`, and one of each in the colours of Okabe and Ito, which
people with any form of colour blindness can distinguish. In all of them the text colours have a contrast of
at least 4.5:1 to the background (WCAG 2.2, success criterion 1.4.3). Textual's themes can be chosen as well.
The choice is not remembered between two starts; an environment variable sets it.

Source of the colours: M. Okabe, K. Ito, "Color Universal Design", 2002; darker on a light background.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from textual.theme import BUILTIN_THEMES, Theme

from engine.errors import UsageError

THEME_VARIABLES = ("APR_WORKBENCH_THEME", "TEXTUAL_THEME")
"""The environment variables that name a theme; the first that is set wins."""
LIGHT_GROUNDS = ("7", "15")
"""White and bright white, the background numbers of `COLORFGBG`."""


def _theme(
    name: str,
    *,
    dark: bool,
    ground: tuple[str, str, str],
    text: tuple[str, str],
    primary: str,
    warning: str,
    success: str,
    error: str,
    accent: str,
) -> Theme:
    """Return a theme whose coloured text has exactly these colours: Textual would blend them with the colour of
    plain text, which makes them more alike."""
    background, surface, panel = ground
    foreground, muted = text
    text_colours = {
        "primary": primary,
        "secondary": primary,
        "warning": warning,
        "success": success,
        "error": error,
        "accent": accent,
        "muted": muted,
    }
    return Theme(
        name=name,
        dark=dark,
        background=background,
        surface=surface,
        panel=panel,
        foreground=foreground,
        primary=primary,
        secondary=primary,
        warning=warning,
        success=success,
        error=error,
        accent=accent,
        variables={f"text-{role}": colour for role, colour in text_colours.items()},
    )


DARK_GROUND, DARK_TEXT = ("#101418", "#181e24", "#202830"), ("#e6e6e6", "#a0a8b0")
LIGHT_GROUND, LIGHT_TEXT = ("#fafafa", "#f0f0f0", "#e6e6e6"), ("#1a1a1a", "#565c62")

OWN = (
    _theme(
        "dark",
        dark=True,
        ground=DARK_GROUND,
        text=DARK_TEXT,
        primary="#5fb0ff",
        warning="#ffb454",
        success="#5fd08a",
        error="#ff6b7a",
        accent="#d29bff",
    ),
    _theme(
        "light",
        dark=False,
        ground=LIGHT_GROUND,
        text=LIGHT_TEXT,
        primary="#005a9e",
        warning="#865300",
        success="#0a6b35",
        error="#b3202f",
        accent="#7a3fb0",
    ),
    _theme(
        "colourblind-dark",
        dark=True,
        ground=DARK_GROUND,
        text=DARK_TEXT,
        primary="#56b4e9",
        warning="#f0e442",
        success="#00b585",
        error="#ea6f12",
        accent="#cc79a7",
    ),
    _theme(
        "colourblind-light",
        dark=False,
        ground=LIGHT_GROUND,
        text=LIGHT_TEXT,
        primary="#0069a5",
        warning="#574300",
        success="#006b4e",
        error="#a84a00",
        accent="#9c4577",
    ),
)
OWN_NAMES = tuple(theme.name for theme in OWN)


def theme_names() -> list[str]:
    """Return every theme name: the workbench's own first, then Textual's in alphabetical order."""
    return [*OWN_NAMES, *sorted(name for name in BUILTIN_THEMES if name not in OWN_NAMES)]


def chosen_theme(option: str | None, environ: Mapping[str, str]) -> str:
    """Return the theme to start with: `--theme`, the environment, or one for the background of the terminal.

    Few terminals report their background (in `COLORFGBG`); the others are assumed to be dark. Raises
    UsageError for an unknown name.
    """
    sources = [("--theme", option), *((name, environ.get(name)) for name in THEME_VARIABLES)]
    for source, name in sources:
        if name:
            return _checked(name, source)
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if ground in LIGHT_GROUNDS else "dark"


def _checked(name: str, source: str) -> str:
    names = theme_names()
    if name not in names:
        near = get_close_matches(name, names, 1)
        raise UsageError(
            f"{source}: expected the name of a theme, found {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            hint=", ".join(names),
        )
    return name
