"""What is wrong, on which node or rank, and what to type: before a run and after it."""
