"""What stands against clients that lie."""
