"""How many bytes kernels take inside, of the card and dimensions alone. Without torch: sizes kept on disk call it."""
