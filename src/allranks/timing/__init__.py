"""From events to speed: steps, phases, comparisons."""
