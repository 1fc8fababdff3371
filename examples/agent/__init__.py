"""An agent: questions whose answers take several searches, and a tiny model that learns to search."""
