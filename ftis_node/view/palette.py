"""Colors of plots and reports, readable on a light and on a dark page."""

from __future__ import annotations

OWN, FOREIGN, MAIN, SECOND = "#3f83dd", "#d9771c", "#1c9c72", "#cf4f8d"
CURVES = (MAIN, OWN, FOREIGN, SECOND, "#8a6fd1", "#9a8a1e", "#2aa3b8", "#b5543f", "#6b8f3a", "#a4779f")
