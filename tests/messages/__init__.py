"""Texts of others: messages, causes, what is said of them and what is not."""
