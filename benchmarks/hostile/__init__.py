"""Hostile load and malformed messages to a server in each of its protocols, and what must hold."""
