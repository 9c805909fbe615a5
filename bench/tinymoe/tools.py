"""The tools: schemas, requests, typed arguments, and what the assistant says of the result.

Each request template names the arguments it gives in braces; optional arguments that it does not
name are not passed. Values of lists and booleans carry the phrase that a person would use.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from tinymoe.words import ANIMALS, CITIES, COLOURS, PEOPLE

__all__ = ["TOOLS", "Argument", "Tool"]

TOPICS = (
    "the budget",
    "the release",
    "the new office",
    "quarterly results",
    "hiring",
    "the roadmap",
    "security",
    "the benchmark",
    "the website",
    "travel plans",
    "the workshop",
    "test coverage",
)
Draw = Callable[[Random], tuple[Any, str]]


class Argument(NamedTuple):
    """A parameter: JSON schema, and how to draw a value and the phrase that stands for it."""

    schema: dict[str, Any]
    draw: Draw
    optional: bool = False


class Tool(NamedTuple):
    """A function, how people ask for it, what it returns, what is said of that."""

    name: str
    description: str
    arguments: dict[str, Argument]
    requests: tuple[str, ...]
    result: Callable[[Random], dict[str, Any]]
    reply: str


def _text(values: list[str] | tuple[str, ...]) -> Argument:
    def draw(random: Random) -> tuple[Any, str]:
        value = random.choice(values)
        return value, value

    return Argument({"type": "string"}, draw)


def _integer(low: int, high: int, optional: bool = False) -> Argument:
    def draw(random: Random) -> tuple[Any, str]:
        value = random.randint(low, high)
        return value, str(value)

    return Argument({"type": "integer"}, draw, optional)


def _number(low: int, high: int) -> Argument:
    def draw(random: Random) -> tuple[Any, str]:
        value = random.randint(low * 10, high * 10) / 10
        return value, str(value)

    return Argument({"type": "number"}, draw)


def _choice(*values: str, optional: bool = False) -> Argument:
    argument = _text(values)
    return Argument({"type": "string", "enum": list(values)}, argument.draw, optional)


def _flag(yes: str, no: str) -> Argument:
    def draw(random: Random) -> tuple[Any, str]:
        value = random.random() < 0.5
        return value, yes if value else no

    return Argument({"type": "boolean"}, draw, True)


def _names(values: list[str]) -> Argument:
    def draw(random: Random) -> tuple[Any, str]:
        chosen = random.sample(values, random.randint(2, 3))
        return chosen, ", ".join(chosen[:-1]) + " and " + chosen[-1]

    return Argument({"type": "array", "items": {"type": "string"}}, draw)


def _code(random: Random) -> tuple[Any, str]:
    value = "".join(random.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=2)) + str(random.randint(100, 999))
    return value, value


def _file(random: Random) -> tuple[Any, str]:
    suffix = random.choice(("txt", "py", "csv", "json", "md", "log"))
    value = f"{random.choice(COLOURS)}_{random.choice(ANIMALS)}.{suffix}"
    return value, value


def _clock(random: Random) -> tuple[Any, str]:
    value = f"{random.randint(7, 20):02d}:{random.choice(('00', '15', '30', '45'))}"
    return value, value


CODE, FILE = Argument({"type": "string"}, _code), Argument({"type": "string"}, _file)
CLOCK = Argument({"type": "string"}, _clock)
WORDS = _text([f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS[::3]])

TOOLS = (
    Tool(
        "get_weather",
        "Weather forecast of a city",
        {
            "city": _text(CITIES),
            "days": _integer(1, 14, True),
            "unit": _choice("celsius", "fahrenheit", optional=True),
        },
        (
            "What is the weather like in {city}?",
            "Give me the forecast for {city} for {days} days.",
            "How will the weather be in {city} over the next {days} days, in {unit}?",
            "Weather in {city} in {unit}, please.",
        ),
        lambda r: {"temperature": r.randint(-9, 35), "sky": r.choice(("clear", "cloudy", "rain"))},
        "It is {temperature} degrees, the sky: {sky}.",
    ),
    Tool(
        "convert_currency",
        "Convert an amount of money",
        {
            "amount": _number(1, 900),
            "source": _choice("EUR", "USD", "GBP", "JPY", "CHF"),
            "target": _choice("SEK", "NOK", "INR", "CAD", "BRL"),
        },
        (
            "How much is {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "I have {amount} {source}. What is that in {target}?",
        ),
        lambda r: {"amount": r.randint(10, 9999) / 10},
        "That is {amount}.",
    ),
    Tool(
        "send_message",
        "Send a message to a person",
        {
            "recipient": _text(PEOPLE),
            "subject": _text(TOPICS),
            "urgent": _flag("This is urgent.", "There is no hurry."),
        },
        (
            "Send {recipient} a message about {subject}.",
            "Write to {recipient} about {subject}. {urgent}",
        ),
        lambda r: {"status": "sent", "id": r.randint(100, 9999)},
        "The message is {status}, its number is {id}.",
    ),
    Tool(
        "create_event",
        "Put an event into the calendar",
        {
            "title": _text(TOPICS),
            "time": CLOCK,
            "minutes": _integer(10, 180, True),
            "guests": _names(PEOPLE),
        },
        (
            "Plan a meeting about {title} at {time} with {guests}.",
            "Set up {minutes} minutes at {time} with {guests} to discuss {title}.",
        ),
        lambda r: {"status": "booked", "room": r.randint(1, 99)},
        "The event is {status} in room {room}.",
    ),
    Tool(
        "read_file",
        "Read lines of a file",
        {"path": FILE, "first": _integer(1, 99, True), "last": _integer(100, 999, True)},
        (
            "Show me {path}.",
            "Open the file {path}, please.",
            "Read lines {first} to {last} of {path}.",
        ),
        lambda r: {"lines": r.randint(1, 999), "owner": r.choice(PEOPLE)},
        "The file has {lines} lines and belongs to {owner}.",
    ),
    Tool(
        "search_files",
        "Find text in files",
        {
            "pattern": WORDS,
            "limit": _integer(1, 60, True),
            "ignore_case": _flag("Ignore case.", "Match the case."),
        },
        (
            "Which files contain {pattern}?",
            "Search for {pattern} and list at most {limit} files.",
            "Find {pattern} in the files. {ignore_case}",
        ),
        lambda r: {"matches": r.randint(0, 200)},
        "There are {matches} matches.",
    ),
    Tool(
        "set_light",
        "Change a lamp",
        {
            "room": _choice("kitchen", "bedroom", "office", "hall", "garage", "bathroom"),
            "brightness": _integer(0, 100),
            "colour": _text(COLOURS),
        },
        (
            "Set the {room} light to {brightness} percent {colour}.",
            "Make the lamp in the {room} {colour} at {brightness} percent.",
        ),
        lambda r: {"status": "done"},
        "The light is set: {status}.",
    ),
    Tool(
        "set_thermostat",
        "Set the temperature of a room",
        {
            "room": _choice("kitchen", "bedroom", "office", "hall", "garage", "bathroom"),
            "degrees": _number(5, 30),
        },
        ("Heat the {room} to {degrees} degrees.", "Set the {room} to {degrees} degrees."),
        lambda r: {"now": r.randint(5, 30)},
        "It is {now} degrees there now.",
    ),
    Tool(
        "set_timer",
        "Start a timer",
        {"minutes": _integer(1, 120), "label": _text(TOPICS)},
        (
            "Start a timer of {minutes} minutes for {label}.",
            "Remind me of {label} in {minutes} minutes.",
        ),
        lambda r: {"id": r.randint(1, 99)},
        "Timer {id} is running.",
    ),
    Tool(
        "find_flight",
        "Find flights between two cities",
        {
            "origin": _text(CITIES[::2]),
            "destination": _text(CITIES[1::2]),
            "passengers": _integer(1, 9, True),
            "direct": _flag("It must be direct.", "Stops are fine."),
        },
        (
            "Find a flight from {origin} to {destination}.",
            "I need {passengers} seats from {origin} to {destination}.",
            "Which flights go from {origin} to {destination}? {direct}",
        ),
        lambda r: {"flight": _code(r)[0], "price": r.randint(40, 900)},
        "Flight {flight} costs {price} euros.",
    ),
    Tool(
        "track_parcel",
        "Tell where a parcel is",
        {"code": CODE},
        ("Where is parcel {code}?", "Track {code} for me.", "Has {code} arrived yet?"),
        lambda r: {"place": r.choice(CITIES), "days": r.randint(1, 9)},
        "It is in {place} and arrives in {days} days.",
    ),
    Tool(
        "get_stock",
        "Price of a share",
        {"symbol": CODE, "days": _integer(1, 365, True)},
        ("What does {symbol} cost today?", "Show the price of {symbol} over {days} days."),
        lambda r: {"price": r.randint(1, 5000) / 10},
        "The price is {price}.",
    ),
    Tool(
        "translate",
        "Translate words",
        {"text": WORDS, "language": _choice("French", "German", "Spanish", "Italian", "Swedish")},
        ("What is {text} in {language}?", "Translate {text} into {language}."),
        lambda r: {"characters": r.randint(5, 40)},
        "The translation has {characters} characters.",
    ),
    Tool(
        "play_music",
        "Play music in a room",
        {
            "genre": _choice("jazz", "rock", "classical", "folk", "techno", "blues"),
            "volume": _integer(1, 100, True),
            "shuffle": _flag("Shuffle it.", "Keep the order."),
        },
        ("Play some {genre}.", "Play {genre} at volume {volume}.", "Put on {genre}. {shuffle}"),
        lambda r: {"tracks": r.randint(2, 80)},
        "{tracks} tracks are in the queue.",
    ),
    Tool(
        "order_food",
        "Order food",
        {
            "dish": _choice("pizza", "soup", "salad", "curry", "pasta", "sushi", "burger"),
            "count": _integer(1, 12),
            "address": _text([f"{c} street" for c in COLOURS]),
        },
        (
            "Order {count} portions of {dish} to {address}.",
            "I want {dish} for {count} people at {address}.",
        ),
        lambda r: {"minutes": r.randint(10, 90), "price": r.randint(8, 200)},
        "It comes in {minutes} minutes and costs {price} euros.",
    ),
    Tool(
        "query_database",
        "Count rows of a table",
        {
            "table": _choice("users", "orders", "events", "invoices", "sessions", "products"),
            "minimum": _integer(0, 999, True),
            "limit": _integer(1, 500, True),
        },
        (
            "Count the rows of {table}.",
            "Query {table}, at most {limit} rows.",
            "How many {table} have a value of at least {minimum}?",
        ),
        lambda r: {"rows": r.randint(0, 9999)},
        "There are {rows} rows.",
    ),
    Tool(
        "run_tests",
        "Run a test suite",
        {
            "path": FILE,
            "workers": _integer(1, 64, True),
            "verbose": _flag("Be verbose.", "Be quiet."),
        },
        (
            "Run the tests in {path}.",
            "Test {path} with {workers} workers.",
            "Run the tests of {path}. {verbose}",
        ),
        lambda r: {"passed": r.randint(1, 500), "failed": r.randint(0, 9)},
        "{passed} tests passed, {failed} failed.",
    ),
    Tool(
        "get_route",
        "Find the way between two cities",
        {
            "origin": _text(CITIES[::2]),
            "destination": _text(CITIES[1::2]),
            "mode": _choice("car", "train", "bicycle", "bus"),
        },
        (
            "How do I get from {origin} to {destination} by {mode}?",
            "Plan a trip by {mode} from {origin} to {destination}.",
        ),
        lambda r: {"kilometres": r.randint(5, 3000), "hours": r.randint(1, 40)},
        "It is {kilometres} kilometres and takes {hours} hours.",
    ),
    Tool(
        "list_servers",
        "List servers of a region",
        {"region": _choice("north", "south", "east", "west"), "minimum_load": _number(0, 9)},
        (
            "Which servers in the {region} have a load above {minimum_load}?",
            "List the {region} servers with load {minimum_load} or more.",
        ),
        lambda r: {"servers": r.randint(0, 300)},
        "There are {servers} of them.",
    ),
    Tool(
        "get_user",
        "Look up a user",
        {"name": _text(PEOPLE), "team": _choice("kernels", "serving", "storage", "docs")},
        ("Look up {name} of the {team} team.", "Who is {name} from {team}?"),
        lambda r: {"id": r.randint(100, 9999), "city": r.choice(CITIES)},
        "User {id} works in {city}.",
    ),
)
