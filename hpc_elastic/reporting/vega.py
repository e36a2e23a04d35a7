"""The only caller of vl-convert: Vega's own code for a page, and pictures without a browser."""

from __future__ import annotations

import json
import struct
import zlib
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
    drawn = _library().vegalite_to_png(json.dumps(spec), scale=scale, allowed_base_urls=[])
    return packed(bytes(drawn))


def packed(png: bytes) -> bytes:
    """Return a PNG file with its pixels compressed as zlib can, which is several times smaller.

    The library trades size for speed. Only the chunks IDAT change (RFC 2083, 4.1.3).
    """
    pixels, before, after, at = b"", png[:8], b"", 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        chunk = png[at : at + 12 + length]
        at += len(chunk)
        if chunk[4:8] == b"IDAT":
            pixels += chunk[8:-4]
        elif pixels:
            after += chunk
        else:
            before += chunk
    data = b"IDAT" + zlib.compress(zlib.decompress(pixels), 6)
    length_of = struct.pack(">I", len(data) - 4)
    return before + length_of + data + struct.pack(">I", zlib.crc32(data)) + after


def _library() -> ModuleType:
    try:
        import vl_convert
    except ImportError as e:
        raise ReportLibraryError(
            f"a page or a picture needs vl-convert ({e}): {REMEDY}; --format json does not"
        ) from e
    library: ModuleType = vl_convert
    return library
