"""Click-log readers and generators."""
