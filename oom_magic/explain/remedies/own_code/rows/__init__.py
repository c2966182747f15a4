"""Data that are taken as a whole, taken some rows at a time instead: calls, statements, steps."""
