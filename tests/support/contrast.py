"""How far two colours stand out from each other, and what the colour-blind see of them."""

from __future__ import annotations

from textual.color import Color


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours: WCAG 2.2, "relative luminance" and "contrast ratio"."""

    def luminance(colour: str) -> float:
        parts = [part / 255 for part in Color.parse(colour).rgb]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def as_seen_without(cone: str, colour: str) -> tuple[float, float, float]:
    """A colour as it is seen without the cones for red (`l`) or green (`m`), in linear RGB: the
    matrices of Viénot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of
    displays by dichromats", 1999."""
    r, g, b = ((part / 255) ** 2.2 for part in Color.parse(colour).rgb)
    red, green = (0.11238, 0.88762) if cone == "l" else (0.29275, 0.70725)
    yellow = red * r + green * g
    blue = (0.00401 if cone == "l" else -0.02234) * (r - g) + b
    return yellow, yellow, blue
