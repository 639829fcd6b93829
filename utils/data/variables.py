"""What a channel is, by its name: its CF standard name, its level, and what WeatherBench calls it.

Standard names are those of the CF convention's table, short names those of ECMWF's parameter database, and
WeatherBench's those of Rasp et al. 2024 (WeatherBench 2).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Short name: WeatherBench's, the standard name, and in words. On pressure levels ...
ON_LEVELS = {
    "u": ("u_component_of_wind", "eastward_wind", "wind from the west"),
    "v": ("v_component_of_wind", "northward_wind", "wind from the south"),
    "w": ("vertical_velocity", "lagrangian_tendency_of_air_pressure", "vertical velocity"),
    "t": ("temperature", "air_temperature", "temperature"),
    "z": ("geopotential", "geopotential", "geopotential"),
    "q": ("specific_humidity", "specific_humidity", "specific humidity"),
    "r": ("relative_humidity", "relative_humidity", "relative humidity"),
    "vo": ("vorticity", "atmosphere_upward_relative_vorticity", "relative vorticity"),
    "d": ("divergence", "divergence_of_wind", "divergence"),
    "pv": ("potential_vorticity", "ertel_potential_vorticity", "potential vorticity"),
}
# ... and without a level.
ALONE = {
    "u10": ("10m_u_component_of_wind", "eastward_wind", "wind from the west at 10 m"),
    "v10": ("10m_v_component_of_wind", "northward_wind", "wind from the south at 10 m"),
    "u100": ("100m_u_component_of_wind", "eastward_wind", "wind from the west at 100 m"),
    "v100": ("100m_v_component_of_wind", "northward_wind", "wind from the south at 100 m"),
    "t2m": ("2m_temperature", "air_temperature", "temperature at 2 m"),
    "d2m": ("2m_dewpoint_temperature", "dew_point_temperature", "dew point at 2 m"),
    "sp": ("surface_pressure", "surface_air_pressure", "pressure at the surface"),
    "msl": ("mean_sea_level_pressure", "air_pressure_at_mean_sea_level", "pressure at mean sea level"),
    "tcwv": ("total_column_water_vapour", "atmosphere_mass_content_of_water_vapor", "water vapour of the column"),
    "sst": ("sea_surface_temperature", "sea_surface_temperature", "temperature of the sea's surface"),
    "tp": ("total_precipitation", "lwe_thickness_of_precipitation_amount", "precipitation"),
    "lsm": ("land_sea_mask", "land_area_fraction", "part of land"),
    "zs": ("geopotential_at_surface", "surface_geopotential", "geopotential at the surface"),
}
# The tutorial's and Makani's names of what ERA5 calls otherwise; the built-in data's: two levels without a pressure.
ALIASES = {"u10m": "u10", "v10m": "v10", "u100m": "u100", "v100m": "v100"}
LAYERS = {"u": "u", "v": "v", "vor": "vo"}
STREAMFUNCTION = ("psi", "atmosphere_horizontal_streamfunction", "streamfunction")
LEVEL = re.compile(r"(.*?)@?(?<!\d)(\d+(?:\.\d+)?)(?:hPa)?")  # a variable, and a level in hPa
NEAR_GROUND = ("u10", "v10", "u100", "v100")  # so many metres above the ground: not u at 10 hPa
LARGEST = 1e15  # of any field in its units
UNITLESS = ("(0 - 1)", "~", "dimensionless", "fraction")  # archives' words for what CF calls 1


@dataclass(frozen=True)
class Variable:
    """What the name of a channel says."""

    short: str | None  # ERA5's, without the level; None where none is known
    standard_name: str | None  # of the CF convention; None where there is none, or none is known
    long_name: str
    wb2: str | None  # WeatherBench's name, without the level
    level: float | None  # hPa


def variable(name: str) -> Variable:
    """Return what a channel is: `z500`, `t2m`, also `geopotential500` and `2m_temperature`."""
    name_here = ALIASES.get(name, name)
    for short, (wb2, standard, words) in ALONE.items():
        if name_here in (short, wb2):
            return Variable(short, standard, words, wb2, None)
    if found := LEVEL.fullmatch(name_here):
        for short, (wb2, standard, words) in ON_LEVELS.items():
            if found[1] in (short, wb2):
                return Variable(short, standard, f"{words} at {float(found[2]):g} hPa", wb2, float(found[2]))
    base, _, layer = name.rpartition("_")
    if layer in ("upper", "lower") and base in (*LAYERS, "psi"):
        _, standard, words = ON_LEVELS[LAYERS[base]] if base in LAYERS else STREAMFUNCTION
        return Variable(None, standard, f"{words}, {layer} layer", None, None)
    return Variable(None, None, name.replace("_", " "), None, None)


def meant(name: str, others: Sequence[str]) -> str:
    """Return a channel's name as one to itself: beside a u100m, as in Makani's data, u100 is the wind at 100 hPa."""
    return f"{name}hPa" if name in NEAR_GROUND and f"{name}m" in others else name


def synonyms(name: str) -> list[str]:
    """Return the names of a variable, this one first: `z` and `geopotential`."""
    found = [name, *([ALIASES[name]] if name in ALIASES else [])]
    for short, (wb2, *_) in {**ON_LEVELS, **ALONE}.items():
        if found[-1] in (short, wb2):
            found += [other for other in (short, wb2) if other not in found]
            break
    return found


def missing(values: np.ndarray) -> np.ndarray:
    """Return where no value is: NaN, infinity, and the huge numbers that archives fill with (1e15, 1e20, 9.97e36)."""
    with np.errstate(over="ignore"):  # float16 ends before: then all that is finite is there
        return ~(np.abs(values) < LARGEST)


def cf_units(units: str) -> str:
    """Return units as UDUNITS reads them: `m s-1`, `1` for a fraction; nothing where none are known."""
    return "1" if units.strip() in UNITLESS else units.strip().replace("**", "")
