"""The magics and the sliders, in a shell and in a real kernel."""
