"""What an application meets: the HTTP gateway and the prefix router."""
