"""The engines behind `opensora.acceleration.engine`, one a file, and what they share."""
