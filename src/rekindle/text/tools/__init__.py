"""Tool calls: how models write them, how they are parsed and forced."""
