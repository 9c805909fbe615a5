"""Recipes and suites: YAML files that come with the package, decoded strictly."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from moet_cli.nearest import unknown_name
from moet_cli.options import convert, get_option
from moet_core.errors import ConfigError, UsageError

__all__ = ["Recipe", "Requires", "Suite", "load_recipe", "load_suite", "recipe_names"]

T = TypeVar("T")
_RECIPES = files("moet_cli") / "recipes"
_SUITES = _RECIPES / "suites"


class Requires(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a recipe needs of the machine."""

    gpus: int = 0


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named set of options.

    Attributes:
        summary: one line for people.
        options: option name to value; see `moet_cli.options`.
        requires: what the machine must have.
    """

    summary: str
    options: dict[str, Any]
    requires: Requires = Requires()


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `moet bench run` measures.

    Attributes:
        summary: one line for people.
        runs: samples per measurement.
        decode_tokens: length of the answer whose speed is measured.
        prefill_words: length of the prompt whose speed is measured, in words.
    """

    summary: str
    runs: int
    decode_tokens: int
    prefill_words: int


def recipe_names() -> list[str]:
    """Return the names of all recipes of the package, sorted."""
    return _names(_RECIPES)


def load_recipe(name: str) -> Recipe:
    """Load a recipe by its name, or from a file if `name` ends in .yaml.

    Raises:
        UsageError: no such recipe; the text names the nearest one.
        ConfigError: its file holds something that a recipe does not have.
    """
    if name.endswith(".yaml"):
        return _load(Path(name), Recipe)
    return _load(_find("recipe", name, _RECIPES), Recipe)


def load_suite(name: str) -> Suite:
    """Load a suite by its name; errors as in `load_recipe`."""
    return _load(_find("suite", name, _SUITES), Suite)


def _names(folder: Traversable) -> list[str]:
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def _find(kind: str, name: str, folder: Traversable) -> Traversable:
    if name not in _names(folder):
        raise UsageError(unknown_name(kind, name, _names(folder)))
    return folder / f"{name}.yaml"


def _load(file: Traversable, type_: type[T]) -> T:
    where = f"{file}: "
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        _check_keys(found, type_, where)
        decoded = msgspec.convert(found, type_)
        if isinstance(decoded, Recipe):
            _check_options(decoded, where)
    except OSError as error:
        raise ConfigError(f"{where}cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{error}.") from error
    return decoded


def _check_keys(found: Any, type_: type, where: str) -> None:
    """Name an unknown key and the nearest valid one, which msgspec's own error does not."""
    if not isinstance(found, dict):
        return
    for field in msgspec.structs.fields(type_):
        if field.type is Requires:
            _check_keys(found.get(field.name), Requires, where)
    allowed = [field.name for field in msgspec.structs.fields(type_)]
    for key in found:
        if key not in allowed:
            raise ConfigError(where + unknown_name("key", str(key), allowed))


def _check_options(recipe: Recipe, where: str) -> None:
    for name, value in recipe.options.items():
        try:
            convert(get_option(name), value)
        except UsageError as error:
            raise ConfigError(f"{where}{error}") from error
