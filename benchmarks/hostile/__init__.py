"""Hostile load and malformed messages against a running server, and what must hold meanwhile."""
