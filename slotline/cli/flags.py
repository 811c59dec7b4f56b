"""Command-line flags from the fields of a settings class."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from shared.settings import Settings

#: Further spellings of a flag.
ALIASES = {"model_path": ["--model"]}


def settings_options(settings: type[Settings]) -> list[click.Option]:
    """One flag for each field.

    A flag that is not given is None, so that the variable, then the default, counts. Values are passed on as
    text: the settings class checks them, and its message names the flag.
    """
    return [_option(name, field) for name, field in _by_kind(settings)]


def _by_kind(settings: type[Settings]) -> Iterable[tuple[str, FieldInfo]]:
    """The class's own fields before those that all settings have."""
    inherited = settings.__mro__[1].model_fields  # type: ignore[attr-defined]
    fields = settings.model_fields
    own = [name for name in fields if name not in inherited]
    return [(name, fields[name]) for name in [*own, *inherited]]


def _option(name: str, field: FieldInfo) -> click.Option:
    flag = "--" + name.replace("_", "-")
    flags = [f"{flag}/--no-{flag[2:]}"] if field.annotation is bool else [flag, *ALIASES.get(name, [])]
    default = None if field.is_required() or field.default in (None, "") else _shown(field.default)
    note = f"SLOTLINE_{name.upper()}" + (f"; {default}" if default is not None else "")
    help_text = " ".join(filter(None, [field.description, f"[{note}]"]))
    if field.annotation is bool:
        return click.Option([name, *flags], default=None, help=help_text)
    return click.Option([name, *flags], metavar=_metavar(field.annotation), help=help_text)


def _shown(default: Any) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else str(default)


def _metavar(annotation: Any) -> str:
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return "|".join(map(str, parts))
    if kind in (UnionType, Union) and NoneType not in parts:
        return "|".join(map(_metavar, parts))
    return {int: "N", float: "X"}.get(parts[0] if kind is Annotated else annotation, "TEXT")
