"""What crosses between host and device in a step, and how it is built."""
