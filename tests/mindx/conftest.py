import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for place in (ROOT, ROOT / "mindx_elastic" / "src"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
