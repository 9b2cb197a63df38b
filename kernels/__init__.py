"""Triton: the persistent decode kernel, its plan and its parts. Nothing here is imported unless it is used."""
