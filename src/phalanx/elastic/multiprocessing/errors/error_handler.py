"""``ErrorHandler``: writes what a process died of into its error file."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import warnings
from typing import Any

from phalanx.process import errorfile

__all__ = ["ErrorHandler"]

logger = logging.getLogger(__name__)


class ErrorHandler:
    """Writes exceptions to the file named by ``TORCHELASTIC_ERROR_FILE`` (unset, empty: nowhere).

    PyTorch's ``ErrorHandler``; meant to be subclassed (`initialize`, `record_exception`).
    Whatever goes wrong in here is a warning: it must not take the place of the error that
    is being recorded.
    """

    def _get_error_file_path(self) -> str | None:
        """The path of this process's error file, or None."""
        return os.environ.get(errorfile.VARIABLE)

    def initialize(self) -> None:
        """Called before the recorded function runs. Turns ``faulthandler`` on."""
        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # stderr may have no descriptor
            warnings.warn(
                f"no stacks on a fatal signal: faulthandler says {type(error).__name__}: {error}",
                stacklevel=2,
            )

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        """Put the JSON text ``error_msg`` at ``file_path``, all of it or nothing."""
        try:
            errorfile.write_text(file_path, error_msg)
        except Exception as error:
            _warn_unwritten(file_path, error)

    def record_exception(self, e: BaseException) -> None:
        """Write ``e`` with its traceback to this process's error file, if it has one."""
        path = self._get_error_file_path()
        if not path:
            return
        try:
            text = json.dumps(errorfile.describe(e))
        except Exception as error:  # an exception whose own text cannot be made
            _warn_unwritten(path, error)
            return
        self._write_error_file(path, text)

    def override_error_code_in_rootcause_data(
        self,
        rootcause_error_file: str,
        rootcause_error: dict[str, Any],
        error_code: int = 0,
    ) -> None:
        """Add the exit code, which a process that is killed cannot write itself."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            logger.warning(
                "%s has no message object: exit code %s is not added to it",
                rootcause_error_file,
                error_code,
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to this process's own, with the child's exit code."""
        found = errorfile.read(rootcause_error_file)
        if found is None:
            logger.error("%s cannot be read as an error file", rootcause_error_file)
            return
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, found.data, error_code)
        own = self._get_error_file_path()
        if not own:
            logger.error(
                "%s is not copied: %s names no error file of this process",
                rootcause_error_file,
                errorfile.VARIABLE,
            )
            return
        self._rm(own)
        self._write_error_file(own, json.dumps(found.data))
        logger.info("copied %s to %s", rootcause_error_file, own)

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """What is printed for a root failure that was a signal; for subclasses that know more."""
        return message

    def _rm(self, my_error_file: str) -> None:
        if not os.path.isfile(my_error_file):
            return
        found = errorfile.read(my_error_file)
        logger.warning(
            "%s is there already and is replaced; it said: %s",
            my_error_file,
            json.dumps(found.data, indent=2) if found else "nothing that can be read",
        )
        try:
            os.remove(my_error_file)
        except OSError as error:
            logger.warning("%s could not be removed: %s", my_error_file, error)


def _warn_unwritten(path: str, error: Exception) -> None:
    warnings.warn(
        f"the error file {path} could not be written: {type(error).__name__}: {error}",
        stacklevel=3,
    )
