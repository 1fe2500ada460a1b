"""Contrast of text on a page."""

from __future__ import annotations

import re


def contrast(page, place: str) -> float:
    """Return the contrast ratio (WCAG 2, from 1 to 21) of the text of the first such element and its background."""
    darker, lighter = sorted(map(luminance, colours(page, place)))
    return (lighter + 0.05) / (darker + 0.05)


def colours(page, place: str) -> list[list[float]]:
    """Return the colours of text and background: red, green and blue from 0 to 255."""
    found = page.locator(place).first.evaluate(
        """(element) => {
            const style = (at) => getComputedStyle(at);
            let behind = element;
            while (style(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [style(element).color, style(behind).backgroundColor];
        }"""
    )
    return [[float(part) for part in re.findall(r"[\d.]+", colour)[:3]] for colour in found]


def luminance(colour: list[float]) -> float:
    """Return the relative luminance, from 0 to 1."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
