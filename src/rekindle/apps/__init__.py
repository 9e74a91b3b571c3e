"""The apps that ask: their states, and the processes they are."""
