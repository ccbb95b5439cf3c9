"""Two machines and what is between them: `doctor --listen` on one, `--connect` on the other."""
