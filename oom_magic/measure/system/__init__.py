"""The check of the whole system: probes, each of which may fail alone, and what they find."""
