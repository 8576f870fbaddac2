"""What every router knows of every worker: summaries of what the workers hold, and how they spread."""
