"""Real tasks in verl's parquet schema, and their rewards."""
