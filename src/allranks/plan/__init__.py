"""What a layout would take, without running it."""
