"""A job as plain JSON data and back: what the journal holds.

Only fields that differ from their defaults are written, so that a journal of an older
version reads well; unknown fields are skipped, so that one of a newer version does too.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from phalanx.recovery.model import Job, JobConfig

_PLANS: dict[Any, tuple[tuple[str, Any, Any], ...]] = {}


def _plan(kind: Any) -> tuple[tuple[str, Any, Any], ...]:
    """(name, default, type) of each field."""
    if kind not in _PLANS:
        hints = typing.get_type_hints(kind)
        _PLANS[kind] = tuple((f.name, _default(f), hints[f.name]) for f in fields(kind))
    return _PLANS[kind]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


_PLAIN = (str, int, float, bool, type(None))


def _pack(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_pack(item) for item in value]
    if is_dataclass(value):
        return _pack_fields(value)
    return value


def _pack_fields(value: Any) -> dict[str, Any]:
    out = {}
    for name, default, _ in _plan(type(value)):
        item = getattr(value, name)
        if item is not default and item != default:
            out[name] = _pack(item)
    return out


@lru_cache(maxsize=4096)
def _config_text(config: JobConfig) -> str:
    return _text(_pack_fields(config))


def _text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def _unpack(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        return _unpack(kinds[0], data)
    if origin is tuple:
        inner = typing.get_args(kind)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_unpack(inner[0], item) for item in data)
        return tuple(_unpack(k, item) for k, item in zip(inner, data, strict=True))
    if is_dataclass(kind):
        known = {name: k for name, _, k in _plan(kind)}
        return typing.cast(Any, kind)(
            **{name: _unpack(known[name], item) for name, item in data.items() if name in known}
        )
    if isinstance(kind, type) and issubclass(kind, Enum | float) and data is not None:
        return kind(data)
    return data


def dump(job: Job) -> str:
    """The job as one line of JSON."""
    # Jobs share their configuration, which changes rarely and is most of the text.
    rest = {"job_id": job.job_id}
    for name, default, _ in _plan(Job):
        item = getattr(job, name)
        if name != "config" and item is not default and item != default:
            rest[name] = _pack(item)
    return f'{{"config":{_config_text(job.config)},{_text(rest)[1:]}'


def load(text: str) -> Job:
    """The job that :func:`dump` wrote. ValueError: it is none."""
    try:
        job = _unpack(Job, json.loads(text))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a job: {error}") from error
    assert isinstance(job, Job)
    return job


def load_config(data: dict[str, Any], base: JobConfig | None = None) -> JobConfig:
    """A job's configuration from plain data; ``base`` gives what it leaves out.

    ValueError names an unknown key or a value of the wrong type.
    """
    known = {name: (default, kind) for name, default, kind in _plan(JobConfig)}
    unknown = set(data) - set(known)
    if unknown:
        raise ValueError(
            f"unknown setting {sorted(unknown)[0]!r}; known are {', '.join(sorted(known))}"
        )
    packed = {**(_pack_fields(base) if base else {}), **data}
    for name, value in packed.items():
        default = known[name][0]
        wanted = int | float if isinstance(default, float) else type(default)
        if isinstance(default, tuple):
            wanted = list
        elif default is None:
            wanted = int | None  # type: ignore[assignment]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"setting {name!r} cannot be {value!r}")
        if isinstance(default, float) and not value > 0:
            raise ValueError(f"setting {name!r} must be greater than 0 seconds, not {value!r}")
    try:
        config = _unpack(JobConfig, packed)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"bad job configuration: {error}") from error
    assert isinstance(config, JobConfig)
    return config
