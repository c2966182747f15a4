"""What helps after a live failure: causes, prices, code to paste."""
