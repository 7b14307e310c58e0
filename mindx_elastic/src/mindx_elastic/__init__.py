"""The public names of MindCluster's Elastic Agent, on Phalanx."""

import sys
from pathlib import Path

from mindx_elastic._version import __version__

__all__ = ["__version__"]


def _refuse_beside_the_vendors() -> None:
    # Cheap on purpose: a .pth file may import this at every start of Python.
    places = {str(Path(__file__).parent.parent)}
    places |= {entry for entry in sys.path if entry.endswith("-packages")}
    found = [
        path
        for place in places
        for kind in ("dist-info", "egg-info")
        for path in Path(place).glob(f"mindx_elastic-*.{kind}")
    ]
    if found:
        raise ImportError(
            f"the vendor's mindx_elastic is installed here ({found[0]}); the two "
            "cannot be used together: pip uninstall mindx_elastic, then install "
            "phalanx-mindx-elastic again"
        )


_refuse_beside_the_vendors()
