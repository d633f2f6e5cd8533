"""Static SVG drawn by Vega-Lite, without a browser or a network."""

from __future__ import annotations

from typing import Any

import vl_convert


def svg(spec: dict[str, Any]) -> str:
    """Draw a Vega-Lite specification.  Text and axes have the colour of the page, so it suits light and dark pages."""
    axis = {
        "domainColor": "currentColor",
        "domainOpacity": 0.5,
        "tickColor": "currentColor",
        "tickOpacity": 0.5,
        "tickSize": 4,
        "gridColor": "currentColor",
        "gridOpacity": 0.1,
        "labelColor": "currentColor",
        "labelFontSize": 12,
        "labelPadding": 4,
        "titleColor": "currentColor",
        "titleFontSize": 12.5,
        "titleFontWeight": "normal",
        "titlePadding": 10,
    }
    frame = {
        "padding": {"left": 2, "right": 8, "top": 8, "bottom": 2},
        "background": None,
        "config": {"aria": False, "view": {"stroke": None}, "axis": axis},
    }
    # No address is allowed, so nothing is ever loaded.
    return vl_convert.vegalite_to_svg(spec | frame, allowed_base_urls=[])
