"""Which source does a command line name?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laneformer.data.collect import Source, files_source, hub_source, rows_source
from laneformer.data.sources import CollectError, check_licence, folder, installed_distributions, standard_library

KINDS = ("auto", "code", "prose")


def choose_source(places: dict[str, Any], options: dict[str, Any], suffixes: tuple[str, ...]) -> Source:
    """The one source of `places` (stdlib, installed, folder, jsonl, parquet, hf) that is given, read with `options`.

    Options are name, licence, column, kind and limit. Raises CollectError where none or several are given.
    """
    given = {place: value for place, value in places.items() if value}
    flags = ", ".join(f"--{place}" for place in places)
    if len(given) != 1:
        raise CollectError(f"{len(given)} places to collect from are given, expected one of {flags}")
    if options["kind"] not in KINDS:
        raise CollectError(f"--kind is {options['kind']!r}, expected one of {', '.join(KINDS)}")
    (place, value), limit = next(iter(given.items())), options["limit"]
    if place in ("stdlib", "installed") and options["licence"]:
        raise CollectError(f"--{place} knows its licences; --license is for the other sources")
    name = options["name"] or default_name(place, value)
    if place in ("stdlib", "installed"):
        return files_source(name, place, standard_library() if place == "stdlib" else installed_distributions(), limit)
    if place == "folder":
        return files_source(name, f"folder {value}", folder(value, check_licence(options["licence"]), suffixes), limit)
    rows = {key: options[key] for key in ("column", "licence", "kind", "limit")}
    return hub_source(name, value, **rows) if place == "hf" else rows_source(name, value, **rows)


def default_name(place: str, value: Any) -> str:
    """A name for a source that was given none."""
    if place in ("stdlib", "installed"):
        return place
    return value.split(":")[0].rpartition("/")[2] if place == "hf" else Path(value).resolve().name.split(".")[0]
