"""Programs as users write them, which run on CUDA for the truth and dry for the tests."""
