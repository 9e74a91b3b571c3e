"""The apps that send requests: their states and processes."""
