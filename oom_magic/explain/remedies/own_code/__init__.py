"""The user's own code with a remedy written into it."""
