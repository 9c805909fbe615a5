"""The tools of a request, and the types that their JSON schemas give to parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from moet_core.errors import ConfigError

__all__ = ["ANY", "Tool", "Tools", "read_tools", "tool_or_unknown"]

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_REFERENCES = 16

# Clients also write the names of other languages, in any case; one that is unknown says nothing.
_NAMES = {
    **{name: frozenset({name}) for name in ANY},
    **dict.fromkeys(("str", "text", "char", "varchar"), frozenset({"string"})),
    **dict.fromkeys(("int", "int32", "int64", "long"), frozenset({"integer"})),
    **dict.fromkeys(("float", "double", "decimal"), frozenset({"number"})),
    **dict.fromkeys(("bool",), frozenset({"boolean"})),
    **dict.fromkeys(("list", "tuple"), frozenset({"array"})),
    **dict.fromkeys(("dict", "map"), frozenset({"object"})),
    **dict.fromkeys(("none",), frozenset({"null"})),
}


class Tool(msgspec.Struct, frozen=True):
    """A tool: its name and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]

    def types(self, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have; `ANY` where the schema does not say."""
        found = ANY
        for schema in _schemas_of(parameter, self.schema, self.schema, MAX_REFERENCES):
            found &= _types(schema, self.schema, MAX_REFERENCES)
        return found or ANY

    def has(self, parameter: str) -> bool:
        """Whether the schema names this parameter."""
        return bool(_schemas_of(parameter, self.schema, self.schema, MAX_REFERENCES, named=True))


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


def _schemas_of(
    parameter: str, schema: Any, root: Mapping[str, Any], references: int, *, named: bool = False
) -> list[Any]:
    """Collect what the schema of an object, and those it refers to, say of a parameter.

    Args:
        parameter: its name.
        schema: of the object.
        root: the schema that references are resolved in.
        references: how many more are followed.
        named: only what says so by the parameter's name.
    """
    if not isinstance(schema, Mapping) or references == 0:
        return []
    found = []
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and parameter in properties:
        found.append(properties[parameter])
    elif "additionalProperties" in schema and not named:
        found.append(schema["additionalProperties"])
    parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    if "$ref" in schema:
        parts.append(_resolve(schema["$ref"], root))
    for part in parts:
        found += _schemas_of(parameter, part, root, references - 1, named=named)
    return found


def _types(schema: Any, root: Mapping[str, Any], references: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or references == 0:
        return ANY
    found = ANY
    if "$ref" in schema:
        found &= _types(_resolve(schema["$ref"], root), root, references - 1)
    kind = schema.get("type")
    if kind is not None:
        kinds = kind if isinstance(kind, list) else [kind]
        found &= frozenset().union(*(_NAMES.get(str(it).lower(), ANY) for it in kinds))
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
    if schema.get("nullable") is True:
        found |= {"null"}
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
