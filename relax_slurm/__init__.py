"""Inference roles of an RL post-training job on one Slurm allocation, on SGLang, without Ray."""

__version__ = "0.1.0"
