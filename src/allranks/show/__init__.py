"""How things are shown: tables, safe text, secrets left out."""
