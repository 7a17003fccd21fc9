"""Adapters for frameworks. Each is imported by its users only, and needs that framework."""
