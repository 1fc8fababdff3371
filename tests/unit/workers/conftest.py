import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # shared modules of these tests: relay_world.py
