"""Federated learning in which clients with different data find out who to learn with."""

__version__ = "0.1.0"
