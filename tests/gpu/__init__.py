"""Cases on a real GPU."""
