"""What clusters and machines have: gathered, counted, shown."""
