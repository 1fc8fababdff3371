"""What start-up and preflight look at beside the table of combinations, one file a subject."""
