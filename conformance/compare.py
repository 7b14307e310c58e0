"""Two observations of one case, and what their difference means."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place where Phalanx differs from torch on purpose.

    `case` is the case's name, `at` the place in its observation (keys joined by dots; empty:
    the whole), `torch` and `ours` what each shows there, `why` the reason.
    """

    case: str
    at: str
    torch: Any
    ours: Any
    why: str


MISSING = "<absent>"


def leaves(torch: Any, ours: Any, at: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two observations differ: place -> (torch's, ours). Lists are compared whole."""
    if isinstance(torch, dict) and isinstance(ours, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*torch, *ours}):
            place = f"{at}.{key}" if at else key
            found.update(leaves(torch.get(key, MISSING), ours.get(key, MISSING), place))
        return found
    return {} if torch == ours and type(torch) is type(ours) else {at: (torch, ours)}


@dataclasses.dataclass
class Verdict:
    case: str
    kind: str  # same | purpose | unexpected | broken
    notes: list[str]
    reasons: dict[str, list[str]]  # why -> where and what


def judge(
    case: str,
    torch: Mapping[str, Any],
    ours: Mapping[str, Any],
    expected: Sequence[Difference],
) -> Verdict:
    """Sort one case. `torch` and `ours` are reports: {"seen": ...} or {"broken": text}."""
    notes = []
    for name, report in (("torch", torch), ("ours", ours)):
        if "broken" in report:
            notes.append(f"{name}: {report['broken']}")
    if notes:
        return Verdict(case, "broken", notes, {})
    listed = {d.at: d for d in expected if d.case == case}
    found = leaves(torch["seen"], ours["seen"])
    reasons: dict[str, list[str]] = {}
    for place, (theirs, mine) in found.items():
        entry = listed.pop(place, None)
        where = place or "(all)"
        if entry is None:
            notes.append(f"{where}: torch {show(theirs)}, ours {show(mine)}")
        elif (as_json(entry.torch), as_json(entry.ours)) != (theirs, mine):
            notes.append(
                f"{where}: listed as torch {show(entry.torch)}, ours {show(entry.ours)}; "
                f"seen torch {show(theirs)}, ours {show(mine)}"
            )
        else:
            line = f"{where}: torch {show(theirs)}, ours {show(mine)}"
            reasons.setdefault(entry.why, []).append(line)
    for place in listed:
        notes.append(f"{place or '(all)'}: listed as different on purpose, but no longer is")
    kind = "unexpected" if notes else "purpose" if reasons else "same"
    return Verdict(case, kind, notes, reasons)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def show(value: Any, limit: int = 120) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[:limit] + "..."


def report(verdicts: Sequence[Verdict], verbose: bool) -> str:
    words = {
        "same": "same",
        "purpose": "on purpose",
        "unexpected": "UNEXPECTED",
        "broken": "BROKEN",
    }
    lines = []
    width = max((len(v.case) for v in verdicts), default=0)
    for v in verdicts:
        if v.kind == "same" and not verbose:
            continue
        lines.append(f"{v.case:<{width}}  {words[v.kind]}")
        lines += [f"    {note}" for note in v.notes]
        for why, places in v.reasons.items():
            lines.append(f"    {why}")
            lines += [f"        {place}" for place in places]
    return "\n".join(lines)


def summary(verdicts: Sequence[Verdict]) -> str:
    count = {kind: sum(v.kind == kind for v in verdicts) for kind in ("same", "purpose", "broken")}
    unexpected = sum(v.kind == "unexpected" for v in verdicts)
    text = f"{count['same']} same, {count['purpose']} on purpose, {unexpected} unexpected"
    return text + (f", {count['broken']} broken" if count["broken"] else "")
