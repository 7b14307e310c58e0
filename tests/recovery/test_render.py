"""The printed table, and the document's copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.recovery import render
from phalanx.recovery.model import State
from phalanx.recovery.table import COMMON, ROWS

DOCUMENT = Path(__file__).parents[2] / "docs" / "recovery-protocol.md"


def test_the_documents_copy_is_current():
    text = DOCUMENT.read_text()
    assert render.into_document(text) == text, (
        "run: python -m phalanx.recovery.render docs/recovery-protocol.md"
    )


def test_everything_is_printed():
    text = render.text()
    for state in State:
        assert f"\n{state.value} " in text
    lines = text.split("Rules")[1].splitlines()[4:]
    assert len([line for line in lines if line]) == len(ROWS) + len(COMMON) + 1


def test_diagrams_name_every_state():
    for drawn in (render.mermaid(), render.dot()):
        for state in State:
            assert state.value.replace("-", "_") in drawn


def test_a_document_without_marks():
    with pytest.raises(ValueError, match="marks"):
        render.into_document("nothing")
