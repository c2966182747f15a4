"""A Description as text and as HTML, with the same rows."""
