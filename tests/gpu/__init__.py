"""Tests on a CUDA device, real or stub."""
