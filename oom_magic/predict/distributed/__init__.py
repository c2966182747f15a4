"""Training on several GPUs: ranks of a job, process groups and what they exchange."""
