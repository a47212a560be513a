"""Fuzzed HTTP requests to a real server, and what must hold of its answers."""
