"""Projections of maps: cartopy's, where it is installed."""

from typing import Any

PLAIN = "plain"


def find_projection(name: str) -> tuple[Any, Any]:
    """Return a projection of cartopy, and that of the data; None twice for plain maps. Raises ValueError.

    To be called before an archive is opened: eccodes, which one of GRIB loads, has a library of projections of its
    own, and where that comes before cartopy's the process ends with a crash.
    """
    if name == PLAIN:
        return None, None
    try:
        from cartopy import crs
    except ImportError:
        raise ValueError(f"projection {name} needs cartopy: `pip install -r requirements-maps.txt`") from None
    try:
        projection = getattr(crs, name)()
        if not isinstance(projection, crs.Projection):
            raise TypeError
    except (AttributeError, TypeError):  # no class, or one that needs more than its name
        raise ValueError(f"projection {name!r} is no map of cartopy.crs: take Robinson, Orthographic or such") from None
    return projection, crs.PlateCarree()
