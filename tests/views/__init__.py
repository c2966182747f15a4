"""How results look: text, HTML, pictures."""
