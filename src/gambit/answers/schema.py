"""The JSON schemas that answers can be held to: those whose every keyword a grammar keeps."""

import json
from collections.abc import Iterator, Mapping

ANY_OBJECT = '{"type": "object"}'
MOST_BYTES = 64 << 10
MOST_LEVELS = 32
OF_NAMES, OF_LISTS, OF_ONE = (
    ("properties", "$defs", "definitions"),
    ("anyOf", "allOf"),
    ("items", "additionalProperties"),
)
NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment", "$defs", "definitions"}
ALONE = {"$ref", "anyOf", "allOf", "enum", "const"}  # each decides alone: a grammar passes over what stands beside it
KNOWN = {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format", *NOTES, *ALONE,
}  # fmt: skip
FORMATS = ("date", "date-time", "duration", "email", "ipv4", "ipv6", "hostname", "time", "uri", "uuid")


def schema_text(schema: object) -> str:
    """Returns a schema as text; raises ValueError for one that no answer could be held to."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise ValueError("is no JSON schema") from None
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES:,} bytes")
    if not isinstance(value, dict) or ("$ref" not in value and value.get("type") != "object"):
        raise ValueError('must have the type "object", as answers have')
    if (found := next(_wrong(value, 1), None)) is not None:
        raise ValueError(found)
    return text


def _wrong(schema: object, level: int) -> Iterator[str]:
    """Yields what a grammar would not keep."""
    if level > MOST_LEVELS:
        yield f"has more than {MOST_LEVELS} levels"
    elif not isinstance(schema, dict):
        if not isinstance(schema, bool):
            yield f"has {json.dumps(schema)[:40]} in place of a schema"
    else:
        yield from _wrong_keywords(schema)
        for name in schema.keys() & {*OF_NAMES, *OF_LISTS, *OF_ONE}:
            inner = [schema[name]] if name in OF_ONE else schema[name]
            if not isinstance(inner, dict if name in OF_NAMES else list):
                yield f"has {name} = {json.dumps(inner)[:40]}, which holds no schemas"
                return
            for each in inner.values() if isinstance(inner, dict) else inner:
                yield from _wrong(each, level + 1)


def _wrong_keywords(schema: Mapping[str, object]) -> Iterator[str]:
    names = schema.keys() - NOTES
    if unknown := names - KNOWN:
        yield f"has the keyword {min(unknown)[:40]!r}, to which answers cannot be held"
    if (alone := names & ALONE) and (
        beside := names - {min(alone)} - ({"type"} if alone <= {"enum", "const"} else set())
    ):
        yield f"has {min(beside)!r} beside {min(alone)!r}, which must stand alone"
    if isinstance(several := schema.get("allOf"), list) and len(several) > 1:
        yield "has an allOf of several schemas: write them as one"
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield f"has the $ref {str(schema['$ref'])[:40]!r}: only those inside it are followed, as in #/$defs/name"
    if schema.get("format", "date") not in FORMATS:
        yield f"has the format {str(schema['format'])[:40]!r}: known are {', '.join(FORMATS)}"
    if names & {"pattern", "format"} and names & {"minLength", "maxLength"}:
        yield "has a pattern or format beside a length: write the length into the pattern"
