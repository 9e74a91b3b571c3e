"""Rekindle inside loops that other people wrote."""
