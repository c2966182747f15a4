"""How often each cause was the one in public reports, and how often answers at first sight were right."""
