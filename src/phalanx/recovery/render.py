"""The table as text and as diagrams; what ``phalanx controller table`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.recovery.model import State
from phalanx.recovery.table import AWAITS, CHOICES, COMMON, DECIDED, ROWS, SENDS, Row


def _next(row: Row) -> str:
    return "" if row.next is None else row.next.value


def _lines(header: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, tuple("-" * width for width in widths), *body)
    ]


def text() -> str:
    """All rules, state by state. Plain text, ends with a newline."""
    states = [
        (s.value, SENDS.get(s, ""), AWAITS.get(s, ("", ""))[0], AWAITS.get(s, ("", "none"))[1])
        for s in State
    ]
    rules = [
        (
            row.state.value if row.state else "any other",
            row.event.__name__,
            row.guard,
            _next(row),
            row.does,
        )
        for row in (*ROWS, *COMMON)
    ]
    out = ["States", "", *_lines(("state", "sends on entry", "waits for", "bound"), states), ""]
    out += ["Rules: the first that matches applies; no next state: it stays.", ""]
    out += _lines(("state", "event", "if", "next", "does"), rules)
    out += ["", f"as chosen: {', '.join(s.value for s in CHOICES)}", ""]
    return "\n".join(out)


def _edges() -> dict[tuple[str, str], list[str]]:
    """Arrows of the diagram with their labels; the choice is a place of its own."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        if row.next is None or row.state is None:
            continue
        target = "choose" if row.next is DECIDED else row.next.value
        label = row.event.__name__ + (f" [{row.guard}]" if row.guard else "")
        edges.setdefault((row.state.value, target), []).append(label)
    for state in CHOICES:
        edges[("choose", state.value)] = []
    return edges


def mermaid() -> str:
    """A Mermaid state diagram."""
    out = ["stateDiagram-v2", "    [*] --> idle", "    state choose <<choice>>"]
    for (source, target), labels in _edges().items():
        # a colon or semicolon would end the label
        label = " / ".join(labels).replace(":", "").replace(";", ",")
        arrow = f"    {_id(source)} --> {_id(target)}"
        out.append(f"{arrow}: {label}" if label else arrow)
    return "\n".join(out) + "\n"


def _id(name: str) -> str:
    return name.replace("-", "_")


def dot() -> str:
    """The same for Graphviz."""
    out = ["digraph recovery {", "  rankdir=LR;", "  choose [shape=diamond];"]
    for (source, target), labels in _edges().items():
        label = "\\n".join(labels)
        out.append(f'  {_id(source)} -> {_id(target)} [label="{label}"];')
    return "\n".join(out) + "\n}\n"


def into_document(document: str) -> str:
    """The document with the copy of the table between its marks brought up to date."""
    head, _, rest = document.partition("<!-- table -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not end:
        raise ValueError("the document has no <!-- table --> and <!-- end --> marks")
    copy = f"```text\n{text()}```\n\n```mermaid\n{mermaid()}```\n"
    return f"{head}<!-- table -->\n{copy}{end}{tail}"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    path = Path(sys.argv[1])
    path.write_text(into_document(path.read_text()))
