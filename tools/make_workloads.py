"""Write the bundled prompt sets, `workloads/*.jsonl` and their YAML headers.

Free text is read from `workload_texts/`; tables, records and configuration files are drawn here from
seeded generators. Running this twice gives the same bytes, and a test compares them with the
committed files.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specbench.workloads.workload import stratified

TEXTS = Path(__file__).resolve().parent / "workload_texts"
WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"

T = TypeVar("T")
Row = dict[str, Any]
Maker = Callable[[Random], Any]


# --- chance -----------------------------------------------------------------------------------
# Only `Random.random()` is promised to give the same numbers in every Python version, so choosing
# and shuffling are built on it instead of on `choice` and `shuffle`.


def pick(rng: Random, options: Sequence[T]) -> T:
    """Draw one of the options."""
    return options[int(rng.random() * len(options))]


def shuffled(rng: Random, items: Sequence[T]) -> list[T]:
    """Return the items in random order."""
    keyed = [(rng.random(), index) for index in range(len(items))]
    return [items[index] for _, index in sorted(keyed)]


def one_of(*options: str) -> Maker:
    """Make a column that holds one of the given words."""
    return lambda rng: pick(rng, options)


def whole(low: int, high: int, step: int = 1) -> Maker:
    """Make a column of whole numbers between two bounds, both included."""
    return lambda rng: pick(rng, range(low, high + 1, step))


def decimal(low: int, high: int, divisor: int) -> Maker:
    """Make a column of decimal numbers: a whole number divided by 10 or 100."""
    return lambda rng: pick(rng, range(low, high + 1)) / divisor


def money(low: int, high: int) -> Maker:
    """Make a column of sums such as 12.50, between two bounds in cents."""
    return lambda rng: f"{pick(rng, range(low, high + 1)) / 100:.2f}"


def day(year: int, first_month: int = 1, last_month: int = 12) -> Maker:
    """Make a column of dates such as 2024-03-17."""
    months = range(first_month, last_month + 1)
    return lambda rng: f"{year}-{pick(rng, months):02d}-{pick(rng, range(1, 29)):02d}"


def clock(first: int, last: int) -> Maker:
    """Make a column of times of day such as 14:35."""
    return lambda rng: f"{pick(rng, range(first, last + 1)):02d}:{pick(rng, range(0, 60, 5)):02d}"


def code(prefix: str, low: int, high: int) -> Maker:
    """Make a column of identifiers such as SH-4821."""
    return lambda rng: f"{prefix}-{pick(rng, range(low, high + 1))}"


# --- records ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schema:
    """A kind of record: its columns, and sentences that say the same in prose."""

    domain: str
    title: str
    columns: dict[str, Maker]
    sentences: tuple[str, ...]

    def rows(self, rng: Random, count: int) -> list[Row]:
        """Draw records whose first column, the key, never repeats."""
        key = next(iter(self.columns))
        rows: dict[str, Row] = {}
        while len(rows) < count:
            row = {name: make(rng) for name, make in self.columns.items()}
            rows.setdefault(str(row[key]), row)
        return list(rows.values())


SCHEMAS = {
    "shipments": Schema(
        "logistics",
        "Consignments of the week",
        {
            "consignment": code("CN", 1000, 9899),
            "origin": one_of("Malmo", "Trieste", "Gdansk", "Antwerp", "Bilbao", "Leith", "Varna", "Turku"),
            "destination": one_of("Lyon", "Graz", "Leipzig", "Brno", "Cork", "Parma", "Tartu", "Ghent"),
            "goods": one_of(
                "ceramic tiles", "bicycle frames", "tinned fish", "oak veneer", "lamp glass", "seed potatoes"
            ),
            "pallets": whole(2, 33),
            "leaves": day(2024, 2, 11),
        },
        (
            "Consignment {consignment} leaves {origin} on {leaves} with {pallets} pallets of {goods} "
            "bound for {destination}.",
            "From {origin} to {destination} go {pallets} pallets of {goods} under the number "
            "{consignment}, departing on {leaves}.",
            "On {leaves} the carrier collects {consignment} in {origin}: {goods}, {pallets} pallets, to be "
            "unloaded in {destination}.",
        ),
    ),
    "appointments": Schema(
        "medicine",
        "Appointments at the practice",
        {
            "patient": code("P", 20000, 89999),
            "date": day(2025, 1, 6),
            "time": clock(8, 16),
            "doctor": one_of("Dr Amari", "Dr Boateng", "Dr Castell", "Dr Dorn", "Dr Eriksen"),
            "reason": one_of(
                "blood test",
                "vaccination",
                "dressing change",
                "check-up",
                "hearing test",
                "travel consultation",
            ),
            "room": whole(1, 9),
        },
        (
            "Patient {patient} sees {doctor} in room {room} on {date} at {time} for a {reason}.",
            "{doctor} expects patient {patient} at {time} on {date}; the reason is a {reason}, the room "
            "is number {room}.",
            "A {reason} is booked for patient {patient} with {doctor}, {date}, {time}, room {room}.",
        ),
    ),
    "ledger": Schema(
        "finance",
        "Entries in the society's ledger",
        {
            "entry": code("L", 100, 999),
            "date": day(2023),
            "payee": one_of(
                "Harbour Print",
                "Ferris & Daughter",
                "Lowland Electric",
                "the tea merchant",
                "Mr Quill",
                "Northgate Insurance",
            ),
            "purpose": one_of("posters", "chairs", "electricity", "tea and biscuits", "repairs", "insurance"),
            "amount": money(840, 48900),
            "account": one_of("hall", "concerts", "youth", "reserve"),
        },
        (
            "Entry {entry} records that on {date} {amount} was paid to {payee} for {purpose} out of "
            "the {account} account.",
            "On {date} the {account} account paid {payee} {amount} for {purpose} (entry {entry}).",
        ),
    ),
    "races": Schema(
        "sport",
        "Results of the hill race",
        {
            "bib": whole(11, 899),
            "runner": one_of(
                "A. Lindgren",
                "B. Achterberg",
                "C. Ivory",
                "D. Mbeki",
                "E. Novak",
                "F. Tanaka",
                "G. Rossi",
                "H. Okonkwo",
                "I. Petrov",
                "J. Walsh",
            ),
            "club": one_of("Fell Hares", "Quarry Striders", "Tideway", "St Brannock", "Uplanders"),
            "minutes": whole(48, 117),
            "seconds": whole(10, 59),
            "category": one_of("open", "junior", "veteran"),
        },
        (
            "Bib {bib}, {runner} of {club}, finished in {minutes} minutes and {seconds} seconds in the "
            "{category} category.",
            "In the {category} category {runner} ({club}, bib {bib}) needed {minutes} minutes and "
            "{seconds} seconds.",
        ),
    ),
    "observations": Schema(
        "astronomy",
        "Observing log",
        {
            "frame": code("F", 3000, 7999),
            "object": one_of("M13", "M31", "M57", "M81", "M92", "NGC 891", "NGC 7331", "Vega", "Mizar"),
            "night": day(2024, 9, 12),
            "exposure_s": whole(30, 600, 30),
            "filter": one_of("red", "green", "blue", "clear", "hydrogen"),
            "seeing_arcsec": decimal(11, 39, 10),
        },
        (
            "Frame {frame} of {object} was taken on {night} through the {filter} filter with an exposure "
            "of {exposure_s} s; seeing {seeing_arcsec} arcsec.",
            "On {night}, seeing {seeing_arcsec} arcsec, we exposed {object} for {exposure_s} s in the "
            "{filter} filter (frame {frame}).",
        ),
    ),
    "nursery": Schema(
        "gardening",
        "Stock of the nursery",
        {
            "label": code("N", 200, 998),
            "plant": one_of(
                "quince",
                "hellebore",
                "winter savory",
                "dwarf medlar",
                "sea kale",
                "white currant",
                "lovage",
                "blue flax",
            ),
            "pots": whole(3, 140),
            "height_cm": whole(8, 160, 4),
            "bed": one_of("east wall", "tunnel", "frame 2", "frame 5", "nut walk"),
            "ready": one_of("now", "in spring", "in May", "next autumn"),
        },
        (
            "Label {label} stands for {pots} pots of {plant} in the bed called {bed}, {height_cm} cm tall "
            "and ready {ready}.",
            "In {bed} there are {pots} pots of {plant} under label {label}; they measure {height_cm} cm "
            "and will be ready {ready}.",
        ),
    ),
    "bookings": Schema(
        "travel",
        "Bookings of the mountain hut",
        {
            "booking": code("B", 4000, 9999),
            "guest": one_of(
                "Ms Adeyemi", "Mr Brandt", "Ms Cohen", "Mr Duarte", "Ms Eklund", "Mr Fontaine", "Ms Gruber"
            ),
            "arrives": day(2025, 6, 9),
            "nights": whole(2, 6),
            "beds": whole(2, 8),
            "meals": one_of("none", "breakfast", "half board", "packed lunch"),
        },
        (
            "{guest} arrives on {arrives} for {nights} nights with {beds} beds, meals: {meals}, booking "
            "{booking}.",
            "Booking {booking} is for {guest}, who needs {beds} beds for {nights} nights from {arrives} "
            "(meals: {meals}).",
        ),
    ),
    "registers": Schema(
        "history",
        "Index to the registers",
        {
            "folio": whole(2, 388),
            "year": whole(1612, 1798),
            "name": one_of(
                "Alys Thorn",
                "Barnaby Cole",
                "Cecily Marsh",
                "Denys Fuller",
                "Edith Rook",
                "Giles Tanner",
                "Hester Vane",
            ),
            "trade": one_of("cooper", "midwife", "glover", "ferryman", "printer", "chandler"),
            "event": one_of("baptism", "marriage", "burial", "apprenticeship", "sale of land"),
            "hand": one_of("clear", "hurried", "faded", "blotted"),
        },
        (
            "Folio {folio} of {year} names {name}, {trade}; the subject is {event} and the hand is {hand}.",
            "Under {event} the clerk of {year} entered the {trade} {name} on folio {folio}, in a {hand} "
            "hand.",
        ),
    ),
    "incidents": Schema(
        "software",
        "Incidents of the past quarter",
        {
            "incident": code("INC", 300, 899),
            "service": one_of("login", "search", "billing", "exports", "mail", "maps", "uploads"),
            "started": clock(0, 23),
            "minutes": whole(4, 190),
            "severity": one_of("low", "medium", "high"),
            "cause": one_of(
                "expired certificate",
                "full disk",
                "slow query",
                "bad deployment",
                "network loop",
                "wrong time zone",
            ),
        },
        (
            "Incident {incident} hit the {service} service at {started}, lasted {minutes} minutes, was "
            "rated {severity} and came from this cause: {cause}.",
            "At {started} the {service} service failed for {minutes} minutes ({incident}, severity "
            "{severity}, cause: {cause}).",
        ),
    ),
    "courses": Schema(
        "education",
        "Evening courses",
        {
            "course": code("EC", 10, 99),
            "subject": one_of(
                "bookbinding",
                "beginners' Greek",
                "first aid",
                "statistics",
                "life drawing",
                "bicycle repair",
                "choral singing",
            ),
            "teacher": one_of("Ms Hale", "Mr Iqbal", "Ms Jansen", "Mr Kovacs", "Ms Lund"),
            "weekday": one_of("Monday", "Tuesday", "Wednesday", "Thursday"),
            "places": whole(6, 28, 2),
            "fee": whole(30, 180, 5),
        },
        (
            "Course {course}, {subject}, is taught by {teacher} on {weekday}; it has {places} places and "
            "costs {fee}.",
            "On {weekday} {teacher} teaches {subject} (course {course}) to at most {places} people for a "
            "fee of {fee}.",
        ),
    ),
    "pantry": Schema(
        "cooking",
        "Pantry list of the canteen",
        {
            "shelf": code("S", 10, 99),
            "item": one_of(
                "pearl barley",
                "white beans",
                "rye flour",
                "rapeseed oil",
                "dried apricots",
                "capers",
                "brown lentils",
            ),
            "kilograms": decimal(5, 420, 10),
            "opened": day(2025, 1, 5),
            "supplier": one_of("Mill Lane", "Aldous & Co", "the cooperative", "Southfield"),
            "use": one_of("soup", "bread", "salad", "stew", "dessert"),
        },
        (
            "Shelf {shelf} holds {kilograms} kg of {item} from {supplier}, opened on {opened} and meant "
            "for {use}.",
            "The {item} on shelf {shelf}, {kilograms} kg from {supplier}, was opened on {opened} for {use}.",
        ),
    ),
    "claims": Schema(
        "law",
        "Claims before the small court",
        {
            "claim": code("SC", 1100, 1999),
            "claimant": one_of("Abbott", "Baines", "Chaudhry", "Delacroix", "Everett", "Fong", "Grieve"),
            "respondent": one_of(
                "Swift Removals", "Oakline Kitchens", "Brook Letting", "City Cycles", "Vista Windows"
            ),
            "sum": whole(120, 4900, 10),
            "filed": day(2024, 1, 8),
            "state": one_of("open", "settled", "dismissed", "awarded"),
        },
        (
            "Claim {claim}, filed on {filed} by {claimant} against {respondent} for {sum}, is {state}.",
            "{claimant} asks {respondent} for {sum} in claim {claim} of {filed}, which is {state}.",
        ),
    ),
    "stations": Schema(
        "weather",
        "Readings of the stations",
        {
            "station": code("W", 110, 189),
            "time": clock(0, 23),
            "temperature_c": decimal(-84, 312, 10),
            "wind_kmh": whole(0, 96),
            "rain_mm": decimal(0, 240, 10),
            "sky": one_of("clear", "broken cloud", "overcast", "fog", "showers"),
        },
        (
            "Station {station} reported {temperature_c} degrees, wind of {wind_kmh} km/h, {rain_mm} mm of "
            "rain and a sky described as {sky} at {time}.",
            "At {time} it was {temperature_c} degrees at station {station} (sky: {sky}, wind {wind_kmh} "
            "km/h, rain {rain_mm} mm).",
        ),
    ),
    "scores": Schema(
        "music",
        "Scores in the orchestra's library",
        {
            "score": code("OM", 500, 999),
            "work": one_of(
                "a serenade", "a suite", "a double concerto", "an overture", "a requiem", "a set of dances"
            ),
            "parts": whole(9, 44),
            "minutes": whole(6, 71),
            "cupboard": one_of("A", "B", "C", "D"),
            "state": one_of("complete", "missing the harp", "with the binder", "on loan"),
        },
        (
            "Score {score} is {work} of {minutes} minutes with {parts} parts, kept in cupboard "
            "{cupboard}; it is {state}.",
            "In cupboard {cupboard} lies {work} ({score}, {parts} parts, {minutes} minutes), at present "
            "{state}.",
        ),
    ),
}


def as_prose(schema: Schema, rng: Random, rows: Sequence[Row]) -> str:
    """Say each record as a sentence."""
    return " ".join(pick(rng, schema.sentences).format(**row) for row in rows)


def as_csv(rows: Sequence[Row], separator: str = ",") -> str:
    """Print records as a header and one separated line each."""
    lines = [separator.join(rows[0])]
    lines += [separator.join(str(value) for value in row.values()) for row in rows]
    return "\n".join(lines)


def as_blocks(rows: Sequence[Row]) -> str:
    """Print records as paragraphs of `name: value` lines."""
    return "\n\n".join("\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows)


def as_bullets(rows: Sequence[Row]) -> str:
    """Print records as one bullet each."""
    return "\n".join(
        "- " + "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()) for row in rows
    )


def as_json_lines(rows: Sequence[Row]) -> str:
    """Print records as one JSON object a line."""
    return "\n".join(json.dumps(row) for row in rows)


def as_markdown(rows: Sequence[Row]) -> str:
    """Print records as a Markdown table."""
    head = f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}"
    return "\n".join([head] + [f"| {' | '.join(map(str, row.values()))} |" for row in rows])


# --- configuration files ----------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Something with settings: its parts, and what can be set on each of them."""

    domain: str
    title: str
    parts: tuple[str, ...]
    settings: dict[str, tuple[Maker, str]] = field(hash=False)

    def draw(self, rng: Random, count: int) -> list[tuple[str, str, Any, str]]:
        """Draw settings as (part, setting, value, comment), grouped by part."""
        chosen = []
        for part in self.parts:
            for name in sorted(shuffled(rng, list(self.settings))[:count]):
                make, comment = self.settings[name]
                chosen.append((part, name, make(rng), comment.format(part=part.replace("_", " "))))
        return chosen


MACHINES = {
    "greenhouse": Machine(
        "gardening",
        "Controller of the tropical greenhouse",
        (
            "north_vent",
            "south_vent",
            "mist_line",
            "heat_mat",
            "shade_cloth",
            "pond_pump",
            "seed_bench",
            "fern_corner",
            "lamp_row",
        ),
        {
            "open_above_c": (whole(18, 34), "degrees at which the {part} starts to act"),
            "poll_seconds": (whole(5, 240, 5), "how often the sensor of the {part} is read"),
            "max_minutes": (whole(4, 90), "longest run of the {part} without a pause"),
            "night_mode": (one_of("off", "half", "full"), "what the {part} does between ten and five"),
            "alarm_after": (whole(2, 9), "failed readings before the {part} calls for help"),
            "power_percent": (whole(20, 100, 5), "share of full power given to the {part}"),
        },
    ),
    "warehouse": Machine(
        "logistics",
        "Conveyors and gates of the depot",
        (
            "inbound_belt",
            "outbound_belt",
            "label_reader",
            "tilt_tray",
            "gate_four",
            "pallet_lift",
            "strapping_arm",
            "returns_chute",
            "weigh_plate",
        ),
        {
            "speed_mm_s": (whole(200, 1900, 50), "speed of the {part} when the hall is staffed"),
            "stop_distance_mm": (whole(80, 640, 20), "distance in which the {part} has to stand still"),
            "queue_limit": (whole(3, 60), "parcels that may wait before the {part} is slowed"),
            "retry_limit": (whole(1, 6), "attempts of the {part} before a person is asked"),
            "service_hours": (whole(150, 4000, 50), "running hours between inspections of the {part}"),
            "idle_after_s": (whole(10, 300, 10), "seconds without work after which the {part} sleeps"),
        },
    ),
    "telescope": Machine(
        "astronomy",
        "Mount and camera of the small dome",
        (
            "mount",
            "guide_camera",
            "main_camera",
            "focuser",
            "dome_slit",
            "filter_wheel",
            "dew_heater",
            "flat_panel",
            "weather_mast",
        ),
        {
            "timeout_s": (whole(2, 90), "how long the {part} may take to answer"),
            "offset_steps": (whole(-400, 400, 5), "mechanical correction of the {part}, measured in May"),
            "retries": (whole(0, 7), "repeated commands before the {part} is reported"),
            "park_at": (one_of("dusk", "dawn", "never", "rain"), "when the {part} returns to rest"),
            "gain": (whole(0, 300, 10), "amplification used by the {part}"),
            "log_level": (one_of("quiet", "normal", "chatty"), "how much the {part} writes to the log"),
        },
    ),
    "payroll": Machine(
        "finance",
        "Monthly payroll run",
        (
            "salaries",
            "overtime",
            "travel_claims",
            "pension",
            "holiday_pay",
            "apprentices",
            "tax_report",
            "bank_file",
        ),
        {
            "cutoff_day": (whole(10, 27), "last day of the month on which {part} may change"),
            "rounding": (one_of("cent", "five_cents", "whole"), "smallest unit in {part}"),
            "approvals": (whole(1, 3), "signatures that {part} needs"),
            "batch_size": (whole(50, 900, 25), "employees handled at once in {part}"),
            "keep_months": (whole(12, 130), "how many months of {part} are kept"),
            "notify": (one_of("clerk", "manager", "nobody", "auditor"), "who hears of an error in {part}"),
        },
    ),
    "pool": Machine(
        "sport",
        "Timing system of the swimming hall",
        (
            "touch_pad",
            "start_signal",
            "lane_display",
            "scoreboard",
            "false_start",
            "backup_clock",
            "relay_sensor",
            "results_printer",
        ),
        {
            "delay_ms": (whole(0, 400, 5), "fixed delay of the {part}"),
            "debounce_ms": (whole(10, 250, 10), "signals closer than this count once for the {part}"),
            "volume": (whole(0, 11), "loudness of the {part}"),
            "channel": (whole(1, 32), "input on which the {part} arrives"),
            "test_before": (one_of("heat", "session", "meet"), "how often the {part} is tested"),
            "tolerance_ms": (whole(1, 30), "deviation of the {part} that is accepted"),
        },
    ),
    "ferry": Machine(
        "travel",
        "Timetable service of the ferries",
        (
            "summer_line",
            "winter_line",
            "night_boat",
            "car_deck",
            "ticket_desk",
            "pier_display",
            "storm_rule",
            "island_bus",
        ),
        {
            "first_hour": (whole(4, 9), "hour of the first departure for the {part}"),
            "interval_min": (whole(15, 180, 5), "minutes between departures of the {part}"),
            "capacity": (whole(20, 640, 10), "people that the {part} takes"),
            "wait_for_train": (one_of("yes", "no", "ten_minutes"), "whether the {part} waits for the train"),
            "max_wind_kmh": (whole(50, 110, 5), "wind above which the {part} is suspended"),
            "refund_percent": (whole(0, 100, 10), "refund when the {part} is cancelled"),
        },
    ),
    "archive": Machine(
        "history",
        "Scanner of the city archive",
        (
            "feeder",
            "lamp",
            "book_cradle",
            "colour_chart",
            "page_finder",
            "text_reader",
            "index_writer",
            "vault_copy",
        ),
        {
            "dpi": (whole(200, 800, 50), "resolution asked of the {part}"),
            "threads": (whole(1, 16), "parallel workers of the {part}"),
            "warm_up_s": (whole(0, 120, 5), "seconds before the {part} is trusted"),
            "min_confidence": (decimal(50, 99, 100), "certainty below which the {part} asks a person"),
            "language": (one_of("latin", "german", "dutch", "english"), "first guess of the {part}"),
            "keep_days": (whole(7, 400), "days before the files of the {part} are removed"),
        },
    ),
    "ward": Machine(
        "medicine",
        "Call system of the hospital ward",
        (
            "bed_button",
            "bath_cord",
            "door_sensor",
            "corridor_light",
            "nurse_pager",
            "night_desk",
            "lift_alarm",
            "quiet_room",
            "visitor_gate",
        ),
        {
            "escalate_after_s": (whole(20, 300, 10), "seconds before a call from the {part} moves on"),
            "repeat_every_s": (whole(5, 60, 5), "seconds between reminders of the {part}"),
            "priority": (whole(1, 5), "rank of the {part} in the queue, one is first"),
            "tone": (one_of("chime", "buzz", "voice", "silent"), "sound made by the {part}"),
            "battery_warn": (whole(5, 40, 5), "charge in percent at which the {part} complains"),
            "record": (one_of("always", "daytime", "never"), "whether calls of the {part} are recorded"),
        },
    ),
}

Settings = list[tuple[str, str, Any, str]]


def as_python(title: str, settings: Settings) -> str:
    """Print settings as a module of constants."""
    lines = [f'"""{title}."""', ""]
    for index, (part, name, value, comment) in enumerate(settings):
        if index == 0 or settings[index - 1][0] != part:
            lines += ["", f"# {part.replace('_', ' ')}"]
        lines.append(f"{part.upper()}_{name.upper()} = {json.dumps(value)}  # {comment}")
    return "\n".join(lines)


def as_toml(title: str, settings: Settings) -> str:
    """Print settings as TOML tables."""
    lines = [f"# {title}"]
    for index, (part, name, value, comment) in enumerate(settings):
        if index == 0 or settings[index - 1][0] != part:
            lines += ["", f"[{part}]"]
        lines.append(f"{name} = {json.dumps(value)}  # {comment}")
    return "\n".join(lines)


def as_yaml(title: str, settings: Settings) -> str:
    """Print settings as nested YAML."""
    lines = [f"# {title}"]
    for index, (part, name, value, comment) in enumerate(settings):
        if index == 0 or settings[index - 1][0] != part:
            lines += [f"{part}:"]
        lines += [f"  # {comment}", f"  {name}: {json.dumps(value)}"]
    return "\n".join(lines)


def as_header(title: str, settings: Settings) -> str:
    """Print settings as a C header."""
    lines = [f"/* {title} */", "#pragma once"]
    for index, (part, name, value, comment) in enumerate(settings):
        if index == 0 or settings[index - 1][0] != part:
            lines.append("")
        lines.append(f"#define {part.upper()}_{name.upper()} {json.dumps(value)} /* {comment} */")
    return "\n".join(lines)


def as_script(title: str, settings: Settings) -> str:
    """Print settings as a TypeScript object."""
    lines = [f"// {title}", "export const settings = {"]
    for index, (part, name, value, comment) in enumerate(settings):
        first = index == 0 or settings[index - 1][0] != part
        last = index + 1 == len(settings) or settings[index + 1][0] != part
        lines += [f"  {part}: {{"] if first else []
        lines.append(f"    {name}: {json.dumps(value)}, // {comment}")
        lines += ["  },"] if last else []
    return "\n".join([*lines, "} as const;"])


# --- prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """A prompt before it has an id: `body` is text, or a list of messages."""

    category: str
    domain: str
    body: str | list[dict[str, str]]


def chat(category: str, domain: str, content: str) -> Draft:
    """Make a draft of one user message."""
    return Draft(category, domain, [{"role": "user", "content": content}])


def blocks(name: str) -> Iterator[tuple[list[str], str]]:
    """Yield (fields, body) of each block of a text file; a block opens with `=== field | field | ...`."""
    text = (TEXTS / name).read_text(encoding="utf-8")
    for block in re.split(r"(?m)^=== (?=\S+ \| )", text)[1:]:
        header, body = block.split("\n", 1)
        yield header.split(" | "), body.strip("\n")


def handwritten(name: str) -> list[Draft]:
    """Read prompts that are complete as they stand: `=== category | domain`, then perhaps a form.

    The form is `text` for a text to continue, `turns` for a chat of several messages, and `long` as a
    remark for the reader.
    """
    drafts = []
    for (category, domain, *form), body in blocks(name):
        if form == ["text"]:
            drafts.append(Draft(category, domain, body))
        elif form == ["turns"]:
            first, *others = re.split(r"(?m)^--- (user|assistant)\n", body)
            turns = [("user", first), *zip(others[::2], others[1::2], strict=True)]
            messages = [{"role": role, "content": content.strip("\n")} for role, content in turns]
            drafts.append(Draft(category, domain, messages))
        else:
            drafts.append(chat(category, domain, body))
    return drafts


def misspell(rng: Random, text: str, count: int) -> str:
    """Swap two letters, neither first nor among the last two, in some of the longer words."""
    words = text.split(" ")
    long_words = [index for index, word in enumerate(words) if len(word) > 5 and word.isalpha()]
    for index in shuffled(rng, long_words)[:count]:
        word = words[index]
        places = [i for i in range(1, len(word) - 3) if word[i] != word[i + 1]]
        place = pick(rng, places)
        words[index] = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    return " ".join(words)


PROOFREAD = (
    "Correct the spelling mistakes in this paragraph and return it otherwise unchanged.\n\n{}",
    "Some letters are swapped in the following text. Repair the words and print the text again.\n\n{}",
    "{}\n\nRewrite the paragraph above with its typing errors fixed; keep every other word.",
    "Proofreading: give me the same sentences without the misspellings.\n\n{}",
    "As an editor, fix only the typos below.\n\n{}",
    "The scan of this page has errors in six words. Return the corrected page.\n\n{}",
    "Typed in a hurry and full of slips - clean it up, please, and change nothing else:\n\n{}",
    "{}\n\nThe text contains misspelled words. Reproduce it in full with the right spelling.",
)
REPLACE = (
    "Replace {0} by {1} throughout and return the full text.\n\n{2}",
    "{2}\n\nPrint this again with {1} in every place where it says {0}.",
    "Edit: {0} becomes {1}, nothing else changes.\n\n{2}",
    "We reuse last year's text. Wherever {0} occurs, write {1}, and give me the whole text.\n\n{2}",
    "Swap {0} for {1} in the notice that follows; answer with the notice.\n\n{2}",
    "{2}\n\nNow write the same text, but about {1} instead of {0}.",
    "In this paragraph {0} is wrong and should be {1}. Output the corrected paragraph.\n\n{2}",
    "Copy the passage and put {1} for {0}:\n\n{2}",
)


def text_edits() -> list[Draft]:
    """Make the proofreading and replacement prompts out of correct paragraphs."""
    drafts = []
    seen = {"proofread": 0, "replace": 0}
    for (kind, domain), body in blocks("predictable-paragraphs.txt"):
        number = seen[kind]
        seen[kind] += 1
        if kind == "proofread":
            rng = Random(f"proofread {number}")
            content = PROOFREAD[number].format(misspell(rng, body, 6))
        else:
            text, old, new = body.split(" || ")
            content = REPLACE[number].format(old, new, text)
        drafts.append(chat("text-edit", domain, content))
    return drafts


PRINTERS: dict[str, Callable[[str, Settings], str]] = {
    "python": as_python,
    "toml": as_toml,
    "yaml": as_yaml,
    "header": as_header,
    "script": as_script,
}


def settings_tasks(workload: str) -> list[Draft]:
    """Make the prompts about configuration files: `=== workload | category | machine | form | settings`."""
    drafts = []
    for (owner, category, name, form, count), template in blocks("settings.txt"):
        if owner != workload:
            continue
        rng = Random(f"{workload} {name}")
        machine = MACHINES[name]
        settings = machine.draw(rng, int(count))
        part, setting, value, _ = pick(rng, [each for each in settings if isinstance(each[2], int)])
        content = template.format(
            part=part.replace("_", " "),
            name=setting,
            old=value,
            new=value + pick(rng, range(1, 4)),
            file=PRINTERS[form](machine.title, settings),
        )
        drafts.append(chat(category, machine.domain, content))
    return drafts


FORMS: dict[str, Callable[[Sequence[Row]], str]] = {
    "csv": as_csv,
    "semicolons": lambda rows: as_csv(rows, ";"),
    "blocks": as_blocks,
    "bullets": as_bullets,
    "json": as_json_lines,
    "markdown": as_markdown,
}


def record_tasks(workload: str) -> list[Draft]:
    """Make the prompts about records: `=== workload | category | schema | form | number of records`."""
    drafts = []
    for (owner, category, name, form, count), template in blocks("records.txt"):
        if owner != workload:
            continue
        rng = Random(f"{workload} {category} {name} {form}")
        schema = SCHEMAS[name]
        rows = schema.rows(rng, int(count))
        data = as_prose(schema, rng, rows) if form == "prose" else FORMS[form](rows)
        columns = ", ".join(schema.columns)
        content = template.format(data=data, title=schema.title, columns=columns, row=pick(rng, rows))
        drafts.append(chat(category, schema.domain, content))
    return drafts


ROUTING = (
    'Route the message to one queue of {shop}: {queues}. Queue name only.\n\n"{issue}"',
    '"{issue}"\n\nWhich desk of {shop} should answer ({queues})? One name.',
    "{shop} sorts its mail into {queues}. Where does this go?\n\n{issue}\n\nQueue:",
    "Ticket: {issue}\nQueues of {shop}: {queues}\nBest queue:",
)


def routing() -> list[Draft]:
    """Make the routing prompts: `=== domain | who receives the mail | queues`, then the message."""
    drafts = []
    for number, ((domain, shop, queues), issue) in enumerate(blocks("routing.txt")):
        listed = ", ".join(shuffled(Random(f"routing {number}"), queues.split(", ")))
        content = ROUTING[number % len(ROUTING)].format(shop=shop, queues=listed, issue=issue)
        drafts.append(chat("routing", domain, content[0].upper() + content[1:]))
    return drafts


# --- the four workloads -----------------------------------------------------------------------


def predictable() -> list[Draft]:
    """Make prompts whose answers largely repeat them."""
    written = handwritten("predictable-code.txt") + handwritten("predictable-quotes.txt")
    return written + text_edits() + settings_tasks("predictable") + record_tasks("predictable")


def short_output() -> list[Draft]:
    """Make prompts whose answers are a few tokens long."""
    return handwritten("short-output.txt") + routing() + record_tasks("short-output")


def high_concurrency() -> list[Draft]:
    """Make the mix of kinds that is served to many clients at once."""
    written = handwritten("high-concurrency.txt")
    return written + settings_tasks("high-concurrency") + record_tasks("high-concurrency")


HEADER = """\
# Written by tools/make_workloads.py; change it there.
name: {name}
description: >-
  {description}
licence: CC0-1.0
prompts: {name}.jsonl
sha256: "{sha256}"
temperatures: [0, 1]
max_new_tokens: {max_new_tokens}
loads: [{loads}]
headline: {headline}
"""


@dataclass(frozen=True)
class Plan:
    """One workload to be written: its prompts and what its header says."""

    drafts: Callable[[], list[Draft]]
    description: str
    max_new_tokens: int
    headline: str
    loads: str = "c=1"


PLANS = {
    "predictable": Plan(
        predictable,
        "Code edits, extraction, quotation and reformatting: most of the answer is already in the prompt,\n"
        "  which is the best case for drafting.",
        128,
        "decode",
    ),
    "novel": Plan(
        lambda: handwritten("novel.txt"),
        "Stories, brainstorms, opinions, inventions and dialogues: short prompts with open answers that\n"
        "  little in the prompt foretells, which is the hard case for drafting.",
        128,
        "decode",
    ),
    "short-output": Plan(
        short_output,
        "Labels, yes or no, routing and number look-up: answers of 1 to 16 tokens, where the prefill and\n"
        "  the cost of starting outweigh the decoding.",
        16,
        "e2e",
    ),
    "high-concurrency": Plan(
        high_concurrency,
        "A mix of questions, writing, code, documents and classification, offered to a server at rising\n"
        "  load. The Poisson rate is a share of ordinary decoding's own throughput on the same machine.",
        64,
        "throughput",
        "c=1, c=8, c=32, poisson=0.7",
    ),
}


LONG = 3000  # characters; the few prompts above it cost most of the prefill


def ordered(name: str, drafts: Sequence[Draft]) -> list[Draft]:
    """Order drafts so that every prefix has the mix of the whole, long prompts included."""
    mixed = shuffled(Random(f"order {name}"), drafts)
    groups = [(draft.category, len(str(draft.body)) >= LONG) for draft in mixed]
    sizes, seen = Counter(groups), Counter[tuple[str, bool]]()
    due = []
    for index, group in enumerate(groups):
        due.append(((seen[group] + 0.5) / sizes[group], index))
        seen[group] += 1
    spread = [mixed[index] for _, index in sorted(due)]
    categories = list(dict.fromkeys(draft.category for draft in drafts))
    spread.sort(key=lambda draft: categories.index(draft.category))
    return [spread[index] for index in stratified([draft.category for draft in spread])]


def jsonl(name: str, drafts: Sequence[Draft]) -> str:
    """Give ids to drafts, and print one prompt a line."""
    counts = Counter[str]()
    lines = []
    for draft in ordered(name, drafts):
        counts[draft.category] += 1
        identity = f"{draft.category}-{counts[draft.category]:02d}"
        body = {"prompt": draft.body} if isinstance(draft.body, str) else {"messages": draft.body}
        line = {"id": identity, "category": draft.category, "domain": draft.domain, **body}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def build() -> dict[str, str]:
    """Return the text of every bundled file, by file name."""
    files = {}
    for name, plan in PLANS.items():
        prompts = jsonl(name, plan.drafts())
        files[f"{name}.jsonl"] = prompts
        files[f"{name}.yaml"] = HEADER.format(
            name=name,
            description=plan.description,
            sha256=hashlib.sha256(prompts.encode()).hexdigest(),
            max_new_tokens=plan.max_new_tokens,
            loads=plan.loads,
            headline=plan.headline,
        )
    return files


def main() -> None:
    """Write the files, and say how many prompts each workload holds."""
    for file_name, text in build().items():
        (WORKLOADS / file_name).write_text(text, encoding="utf-8", newline="\n")
        if file_name.endswith(".jsonl"):
            print(f"{file_name}: {text.count(chr(10))} prompts")


if __name__ == "__main__":
    main()
