"""What can be known of a run before anything heavy starts: its config, its memory, and what would stop it."""
