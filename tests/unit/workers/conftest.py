import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what these tests share: cluster.py, training_world.py
