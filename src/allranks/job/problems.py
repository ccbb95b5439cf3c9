"""Messages about wrong values in a job; the allowed values come from its JSON schema."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from allranks.job.yaml_lines import COMMAND_LINE, Layer, Origin, Problem

Schema = Mapping[str, Any]

# The type of pydantic errors that come from our own checks; their `ctx` holds the message.
OWN = "allranks"


def problems_of(error: ValidationError, schema: Schema, layer: Layer) -> list[Problem]:
    """One problem per key, even where a value fits none of several members of a union."""
    found: dict[tuple[str, ...], Problem] = {}
    for detail in error.errors(include_url=False):
        path = _key_path(schema, [str(part) for part in detail["loc"]])
        place = layer.place(path)
        if detail["type"] == "extra_forbidden":
            found.setdefault(path, unknown_key(path, key_paths(schema), place))
        elif detail["type"] == OWN:
            words = detail["ctx"]
            key = ".".join(path)
            what = words["what"] if words["what"].startswith(key) else f"{key}: {words['what']}"
            found.setdefault(path, Problem(place, what, words["fix"]))
        elif detail["type"] == "missing":
            fix = f"write {_assignment(path, _example(_at(schema, path), None), place)}"
            found.setdefault(path, Problem(place, f"{'.'.join(path)} is missing", fix))
        else:
            # The whole value: pydantic's input may be one element of a list.
            value = _value_at(layer.values, path, detail["input"])
            found.setdefault(path, _wrong_value(path, value, schema, place))
    return list(found.values())


def unknown_key(path: Sequence[str], known: Sequence[str], place: Origin) -> Problem:
    """A key that does not exist; `known` are the dotted paths to suggest from, in any section."""
    key, parent = path[-1], ".".join(path[:-1])
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(".".join(path), siblings, n=1)
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    nested = [name for name in known if name.rpartition(".")[2] == _SYNONYMS.get(key)]
    guesses = list(dict.fromkeys([*elsewhere, *close, *nested]))
    if ".".join(path) in known:
        fix = f"write {key.rpartition('.')[2]} indented under {key.rpartition('.')[0]}:"
    elif guesses:
        fix = f"write {' or '.join(guesses)} instead of {'.'.join(path)}"
    elif siblings:
        names = ", ".join(name.rpartition(".")[2] for name in siblings)
        fix = f"the keys {f'of {parent}' if parent else 'of a job'} are {names}"
    else:
        fix = f"remove {'.'.join(path)}: {parent} takes no keys"
    return Problem(place, f"{'.'.join(path)}: there is no such key", fix)


# Other tools' names for our keys, which are spelled too differently to be guessed.
_SYNONYMS = {
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "grad_clip": "clip",
    "gradient_clip_val": "clip",
    "per_device_train_batch_size": "batch_size_per_rank",
    "gradient_accumulation_steps": "micro_batch_size",
    "accumulate_grad_batches": "micro_batch_size",
    "gpus": "layout",
    "nodes": "layout",
    "script": "command",
    "workers": "num_workers",
}


def key_paths(schema: Schema, prefix: str = "", root: Schema | None = None) -> list[str]:
    """Every key of the schema as a dotted path."""
    root = root or schema
    found: list[str] = []
    for name, below in schema.get("properties", {}).items():
        found.append(prefix + name)
        found += key_paths(_object(below, root), f"{prefix}{name}.", root)
    return found


def choices(schema: Schema) -> list[str]:
    """The fixed values that a key allows, as written in YAML; empty if it allows others too."""
    members = list(_members(schema))
    if not all("enum" in member or "const" in member for member in members):
        return []
    return [
        _yaml(value) for member in members for value in member.get("enum", [member.get("const")])
    ]


def in_words(schema: Schema) -> str:
    """`a positive integer`, `one of adamw, sgd`, `a number from 0 to 1 or null`."""
    members = list(_members(schema))
    if fixed := choices(schema):
        return f"one of {', '.join(fixed)}"
    return " or ".join(_one_in_words(member) for member in members)


def _members(schema: Schema) -> Iterator[Schema]:
    for member in schema.get("anyOf", [schema]):
        if member.get("type") == "boolean":
            yield {"enum": [True, False]}
        elif member.get("type") != "null":
            yield member
        # If null is the default, leaving the key out means the same.
        elif schema.get("default", ...) is not None:
            yield {"const": None}


def _one_in_words(schema: Schema) -> str:
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        return " or ".join(_yaml(value) for value in schema.get("enum", [schema.get("const")]))
    if kind in ("integer", "number"):
        return _number_in_words(schema, str(kind))
    if kind == "string" and "examples" in schema:
        return f"text such as {' or '.join(schema['examples'])}"
    if kind == "array" and "prefixItems" in schema:
        item = _one_in_words(schema["prefixItems"][0])
        return f"a list of {len(schema['prefixItems'])}, each {item}"
    if kind == "array":
        return "a list of text"
    words = {"string": "text", "boolean": "true or false", "object": "a mapping of keys to values"}
    return words.get(str(kind), "a mapping of keys to values")


def _number_in_words(schema: Schema, noun: str) -> str:
    words = {"exclusiveMinimum": "above", "minimum": "at least"}
    words |= {"maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {_yaml(schema[key])}" for key, word in words.items() if key in schema]
    if limits == ["above 0"]:
        return f"a positive {noun}"
    article = "an" if noun == "integer" else "a"
    return f"{article} {noun}" + (f", {' and '.join(limits)}" if limits else "")


def _wrong_value(path: Sequence[str], value: Any, root: Schema, place: Origin) -> Problem:
    schema = _at(root, path)
    words = in_words(schema)
    example = _example(schema, value)
    fix = f"write {_assignment(path, example, place)}" if example else f"give {words}"
    fixed = choices(schema)
    allowed = f" (allowed: {', '.join(fixed)})" if fixed else f" ({words})" if example else ""
    return Problem(place, f"{'.'.join(path)}: expected {words}, got {_got(value)}", fix + allowed)


def _assignment(path: Sequence[str], value: str, place: Origin) -> str:
    if place.text.endswith(COMMAND_LINE):
        return f"{'.'.join(path)}={value}"
    return f"{'.'.join(path)}: {value}"


def _example(schema: Schema, value: Any) -> str:
    """A valid value: the closest of the allowed ones, or the default."""
    fixed = choices(schema)
    if fixed and (close := difflib.get_close_matches(str(value).lower(), fixed, n=1)):
        return close[0]
    default = schema.get("default")
    examples = [
        *([default] if default and not isinstance(default, dict) else []),
        *schema.get("examples", []),
        *(example for member in _members(schema) for example in member.get("examples", [])),
    ]
    if examples:
        return _yaml(examples[0])
    return fixed[0] if fixed else ""


def _key_path(schema: Schema, location: Sequence[str]) -> tuple[str, ...]:
    """The keys in a pydantic location, without names of union members, `[key]` and indices."""
    path: list[str] = []
    below = schema
    for part in location:
        properties = below.get("properties", {})
        if part not in properties and path and "additionalProperties" not in below:
            break
        path.append(part)
        below = _object(properties.get(part, {}), schema)
    return tuple(path)


def _value_at(values: Any, path: Sequence[str], otherwise: Any) -> Any:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return otherwise
        values = values[part]
    return values


def _at(root: Schema, path: Sequence[str]) -> Schema:
    schema = root
    for index, part in enumerate(path):
        below = _object(schema, root) if index else schema
        fallback = below.get("additionalProperties")
        found = below.get("properties", {}).get(part, fallback)
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return schema


def _object(schema: Schema, root: Schema) -> Schema:
    """The schema of the mapping that a key's value may be; empty if it may not be one."""
    for member in schema.get("anyOf", [schema]):
        if "$ref" in member:
            found: Schema = root["$defs"][member["$ref"].rpartition("/")[2]]
            return found
        if member.get("type") == "object":
            return dict(member)
    return {}


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _got(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
