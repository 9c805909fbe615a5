"""The tools of a request, and the types that their JSON schemas give to parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from moet_core.errors import ConfigError

__all__ = ["ANY", "Tool", "Tools", "read_tools", "tool_or_unknown"]

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_REFERENCES = 16


class Tool(msgspec.Struct, frozen=True):
    """A tool: its name and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]

    def types(self, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have; `ANY` where the schema does not say."""
        properties = self.schema.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return ANY
        return _types(properties[parameter], self.schema, MAX_REFERENCES)

    def has(self, parameter: str) -> bool:
        """Whether the schema names this parameter."""
        properties = self.schema.get("properties")
        return isinstance(properties, Mapping) and parameter in properties


Tools = Mapping[str, Tool]

_UNKNOWN = Tool("", {})


def tool_or_unknown(tools: Tools, name: str) -> Tool:
    """Return a tool; one whose schema says nothing if there is no such tool."""
    return tools.get(name, _UNKNOWN)


def read_tools(tools: Iterable[Any] | None) -> dict[str, Tool]:
    """Read the tools of a request.

    Args:
        tools: as Chat Completions has them (`{"type": "function", "function": {...}}`), as
            Responses has them (`{"type": "function", "name": ...}`), or either as objects with
            those attributes. Tools that are no functions are passed over.

    Raises:
        ConfigError: a function without a name.
    """
    found: dict[str, Tool] = {}
    for tool in tools or ():
        function = _get(tool, "function") or tool
        if _get(tool, "type") not in (None, "function"):
            continue
        name, schema = _get(function, "name"), _get(function, "parameters")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"A tool needs a name; {tool!r} has none.")
        found[name] = Tool(name, schema if isinstance(schema, Mapping) else {})
    return found


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)


def _types(schema: Any, root: Mapping[str, Any], references: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or references == 0:
        return ANY
    found = ANY
    if "$ref" in schema:
        found &= _types(_resolve(schema["$ref"], root), root, references - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        found &= {kind}
    elif isinstance(kind, list):
        found &= frozenset(item for item in kind if isinstance(item, str))
    if "const" in schema:
        found &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= frozenset(map(_type_of, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(
                *(_types(part, root, references - 1) for part in schema[key])
            )
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            found &= _types(part, root, references - 1)
    if "number" in found:
        found |= {"integer"}
    return found or ANY


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """Follow a reference within the schema, such as `#/$defs/Point`; None if it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference[2:].split("/"):
        if not isinstance(target, Mapping):
            return None
        target = target.get(part.replace("~1", "/").replace("~0", "~"))
    return target


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
    return "array"
