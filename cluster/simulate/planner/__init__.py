"""A day of requests, of which number and kind change with the hour, over workers that follow them or do not."""
