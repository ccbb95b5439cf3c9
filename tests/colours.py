"""Whether text on a page can be read."""

from __future__ import annotations

import re
from typing import Any


def contrast(page: Any, selector: str) -> float:
    """Between an element's ink and its paper, as the WCAG counts it; 4.5 is enough for text."""
    colours = page.evaluate(
        """selector => {
            const element = document.querySelector(selector);
            let paper = element;
            while (getComputedStyle(paper).backgroundColor === 'rgba(0, 0, 0, 0)')
                paper = paper.parentElement;
            return [getComputedStyle(element).color, getComputedStyle(paper).backgroundColor];
        }""",
        selector,
    )
    ink, paper = (luminance([int(part) for part in re.findall(r"\d+", c)[:3]]) for c in colours)
    return (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)


def luminance(rgb: list[int]) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
