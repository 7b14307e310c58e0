import sys
from pathlib import Path

# the doubles and the harness live in compat/, beside the command that uses them too
sys.path.insert(0, str(Path(__file__).parents[2]))
