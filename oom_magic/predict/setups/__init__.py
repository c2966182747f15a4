"""Training runs described by settings: models, cards, and the code that is written for them."""
