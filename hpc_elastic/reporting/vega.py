"""The only caller of vl-convert: Vega's own code for a page, and pictures without a browser."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from hpc_elastic.errors import HpcElasticError

REMEDY = "pip install 'hpc_elastic[report]'"


class ReportLibraryError(HpcElasticError, ImportError):
    """The library that draws charts is not installed."""


def script() -> str:
    """Return Vega, Vega-Lite and their embedding as one script, which sets ``vegaEmbed``.

    Raises:
        ReportLibraryError: it is not installed.
    """
    return str(_library().javascript_bundle())


def png(spec: dict[str, Any], scale: float = 2.0) -> bytes:
    """Return a chart as a picture.

    Args:
        spec: In Vega-Lite.
        scale: Pixels of the picture for each of the spec.

    Raises:
        ReportLibraryError: the library is not installed.
    """
    return bytes(_library().vegalite_to_png(json.dumps(spec), scale=scale, allowed_base_urls=[]))


def _library() -> ModuleType:
    try:
        import vl_convert
    except ImportError as e:
        raise ReportLibraryError(
            f"a page or a picture needs vl-convert ({e}): {REMEDY}; --format json does not"
        ) from e
    library: ModuleType = vl_convert
    return library
