"""What goes when space is needed."""
