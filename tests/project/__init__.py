"""The project itself: its architecture, public names, languages, README, notebooks."""
