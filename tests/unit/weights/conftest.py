import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # shared module of these tests: relay_world.py
