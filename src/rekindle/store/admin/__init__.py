"""Checks, reports and archives of a cache folder."""
