"""Hugging Face ``Trainer`` under ``phalanx run``.

    trainer = Trainer(..., callbacks=[PhalanxCallback()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

The trainer's loop cannot do a step again, so a fault restarts the whole group, warm, from the
newest whole checkpoint. (A loop of one's own with Accelerate can: open a
`phalanx.training.session` before ``Accelerator()`` and use its steps.)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed
from transformers import TrainerCallback

from phalanx import progress
from phalanx.training.integrations.notice import Notice, announce, under_agent

dist: Any = torch.distributed

MARK = "phalanx-commit.json"

_BETWEEN = (__name__, "transformers.trainer_callback")


class PhalanxCallback(TrainerCallback):  # type: ignore[misc]
    """Progress and phases for the agent's hang detection; on SIGTERM to any rank, all write a
    checkpoint after the same step and training ends with ``stopped`` true.

    ``every``: steps between two questions whether to stop. ``grace``: see `Notice`.
    """

    def __init__(self, every: int = 1, grace: float = 20.0) -> None:
        #: whether training ended because of a notice to stop
        self.stopped = False
        self._notice = Notice(every, grace)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        stop = "SIGTERM: a checkpoint of all ranks after the same step"
        announce(
            "Trainer under an agent: hangs are found by its progress, a fault restarts all ranks "
            "warm from the newest whole checkpoint (its loop cannot do a step again, so not in "
            f"place); {stop}"
            if under_agent()
            else f"Trainer without an agent: {stop}"
        )
        self._notice.open(_loop(sys._getframe(1)))
        progress(int(state.global_step), "start")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        progress(int(state.global_step), "step")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        progress()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._notice.agreed():
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True
        phase = "between"
        if control.should_evaluate:
            phase = "evaluation"
        elif control.should_save:
            phase = "checkpoint"
        progress(int(state.global_step), phase)
        return control

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        progress(phase="evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        progress(phase="checkpoint" if control.should_save else "between")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All files are written: say so, once all ranks have come here."""
        world = 1
        if dist.is_available() and dist.is_initialized():
            world = dist.get_world_size()
            dist.barrier()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                _commit(folder, int(state.global_step), world)
        progress(phase="between")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._notice.close()
        progress(phase="between")


def _loop(frame: FrameType | None) -> FrameType | None:
    """The trainer's loop, which has called us through its handler of callbacks."""
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame


def _commit(folder: Path, step: int, world: int) -> None:
    generation = int(os.environ.get("PHALANX_GENERATION", "1"))
    half = folder / f"{MARK}.half"
    with half.open("w") as file:
        file.write(json.dumps({"step": step, "world": world, "generation": generation}))
        file.flush()
        os.fsync(file.fileno())
    half.rename(folder / MARK)


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint that all ranks have written to its end; None if there is none.

    For ``Trainer.train(resume_from_checkpoint=...)``. Keep two (``save_total_limit=2``): one is
    not whole while it is written.
    """
    found = []
    for mark in Path(output_dir).glob(f"checkpoint-*/{MARK}"):
        try:
            found.append((int(json.loads(mark.read_text())["step"]), str(mark.parent)))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(found)[1] if found else None
