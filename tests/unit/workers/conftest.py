import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # shared modules of these tests: cluster.py, training_world.py
