"""PyTorch Lightning under ``phalanx run``.

callback = PhalanxCallback("checkpoints")
trainer = Trainer(..., callbacks=[callback])
trainer.fit(model, loader, ckpt_path=callback.newest())
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch import Callback

from phalanx import progress
from phalanx.training.integrations.notice import Notice, announce, under_agent

dist: Any = torch.distributed

_NAME = re.compile(r"step-(\d+)\.ckpt")


class PhalanxCallback(Callback):  # type: ignore[misc]
    """Progress and phases for the agent's hang detection; checkpoints that are whole or not
    there; on SIGTERM to any rank, all write one after the same step and ``fit`` ends with
    ``stopped`` true.

    ``folder``: of the checkpoints, seen by all ranks. ``save_every``: steps between them, 0:
    only on a notice to stop. ``keep``: how many. ``every``, ``grace``: see `Notice`.

    Resumed in the middle of an epoch, the batches that were used are skipped (Lightning itself
    begins the epoch anew where the loader keeps no position of its own).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        save_every: int = 0,
        keep: int = 2,
        every: int = 1,
        grace: float = 20.0,
    ) -> None:
        #: whether ``fit`` ended because of a notice to stop
        self.stopped = False
        self.folder = Path(folder)
        self._save_every = save_every
        self._keep = max(1, keep)
        self._notice = Notice(every, grace)
        self._step = 0  # the last that was done

    def newest(self) -> str | None:
        """The newest checkpoint, for ``fit(ckpt_path=...)``; None if there is none."""
        found = self._saved()
        return str(found[max(found)]) if found else None

    def _saved(self) -> dict[int, Path]:
        found = {}
        for path in self.folder.glob("step-*.ckpt"):
            if match := _NAME.fullmatch(path.name):
                found[int(match[1])] = path
        return found

    # -- what Lightning calls --------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        stop = "SIGTERM: a checkpoint of all ranks after the same step"
        announce(
            f"Trainer under an agent: hangs are found by its progress, a fault restarts all ranks "
            f"warm from the newest checkpoint in {self.folder}; {stop}"
            if under_agent()
            else f"Trainer without an agent: {stop}"
        )
        self._skip_used(trainer)
        self._notice.open()
        self._step = int(trainer.global_step)
        progress(self._step, "start")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        progress(int(trainer.global_step), "step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = int(trainer.global_step)
        if step == self._step:  # gradients are gathered: no checkpoint would have them
            progress(step, "between")
            return
        self._step = step
        self.stopped = self._notice.agreed() or self.stopped
        regular = self._save_every and step % self._save_every == 0
        if self.stopped or regular:
            progress(step, "checkpoint")
            self._save(trainer, step)
        if self.stopped:
            trainer.should_stop = True
            # A minimum of epochs or steps is for early stopping, not for a machine that goes away.
            trainer.fit_loop.min_epochs = None
            trainer.fit_loop.epoch_loop.min_steps = None
        progress(step, "between")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        progress(phase="evaluation")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        progress(phase="evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        progress(phase="between")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._notice.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._notice.close()

    # -- checkpoints -------------------------------------------------------------------

    def _save(self, trainer: Any, step: int) -> None:
        """By all ranks: under another name first, so that a kill leaves no half one."""
        final = self.folder / f"step-{step}.ckpt"
        draft = self.folder / f"draft-{step}.ckpt"
        trainer.save_checkpoint(draft)
        trainer.strategy.barrier("phalanx")
        if trainer.is_global_zero:
            if final.is_dir():
                shutil.rmtree(final)
            os.replace(draft, final)
            saved = self._saved()
            for old in sorted(saved)[: -self._keep]:
                _remove(saved[old])
            for rest in self.folder.glob("draft-*"):
                _remove(rest)

    def _skip_used(self, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        used = int(loop.batch_progress.current.ready)
        fetcher = trainer.fit_loop._data_fetcher
        if not trainer.fit_loop.restarting or not used or fetcher is None:
            return
        if used >= trainer.num_training_batches or _resumable(trainer):
            return
        for _ in range(used):
            next(fetcher)
        fetcher.fetched -= used  # the loop adds them itself


def _resumable(trainer: Any) -> bool:
    loader = trainer.fit_loop._combined_loader
    return all(hasattr(one, "load_state_dict") for one in loader.flattened)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
