"""How things are shown: numbers, tables, console, safe text, secrets left out."""
