"""``phalanx mindx enable|disable|status``: mindx_elastic's patch in every torchrun here."""

from __future__ import annotations

import argparse
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

NAME = "phalanx_mindx.pth"
# Nothing happens, and nothing is said, once mindx_elastic has been uninstalled.
LINE = (
    "import importlib.util as _u; "
    "_u.find_spec('mindx_elastic') and __import__('mindx_elastic.api')\n"
)


def _folder() -> Path:
    folder = Path(sysconfig.get_paths()["purelib"])
    if folder.is_dir():
        return folder
    return Path(site.getusersitepackages())


def main(argv: Sequence[str]) -> int:
    """Adds or removes one .pth file of our own; touches nothing of torch. 1: it failed."""
    parser = argparse.ArgumentParser(
        prog="phalanx mindx",
        description="Has every Python of this environment load mindx_elastic.api, which patches "
        "torch's agent when that is imported.",
    )
    parser.add_argument("what", choices=("enable", "disable", "status"))
    what = parser.parse_args(argv).what
    path = _folder() / NAME
    try:
        if what == "enable":
            from importlib.util import find_spec

            if find_spec("mindx_elastic") is None:
                print(
                    "phalanx mindx: mindx_elastic is not installed here; pip install "
                    "phalanx-mindx-elastic",
                    file=sys.stderr,
                )
                return 1
            path.write_text(LINE)
            print(f"enabled: {path}")
        elif what == "disable":
            path.unlink(missing_ok=True)
            print(f"disabled: {path} is not there")
        else:
            print(f"{'enabled' if path.exists() else 'disabled'}: {path}")
    except OSError as error:
        print(f"phalanx mindx: {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0
