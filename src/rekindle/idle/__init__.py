"""Idle work: answers and KV prepared before anybody asks."""
