"""Texts of the target in bulk for training, by three backends: the native library, torch, CUDA graphs."""
